"""The charts that a report can have, by name."""

CHARTS: dict[str, str] = {
    "strong": "speedup of a fixed problem against workers, the ideal, Amdahl's law",
    "weak": "efficiency and time of a step with fixed work per worker, the ideal, Gustafson's law",
    "speedup-by-model": "speedup against workers, a panel per strategy, a line per model",
    "throughput": "images per second against workers",
    "breakdown": "where the time of a step goes, by setting",
    "breakdown-by-rank": "where the time of a step goes, rank by rank",
    "utilisation": "how busy workers and nodes are over time",
    "packets": "packets in and out of every node over time",
    "traffic": "what a server, a worker and a node of the ring move for each update, against workers",
    "servers": "speedup against the number of parameter servers",
    "accuracy-by-workers": "accuracy and loss of the trained model against workers",
    "time-by-batch": "time of an epoch against the batch size",
    "accuracy-by-batch": "accuracy of the trained model against the batch size",
    "loss-by-batch": "loss of the trained model against the batch size",
    "nodes": "total and epoch time by number of nodes",
    "learning-time": "learning curves against time",
    "learning-samples": "learning curves against samples",
    "time-to-accuracy": "time until a given accuracy is reached",
    "memory": "peak memory of every rank",
}
