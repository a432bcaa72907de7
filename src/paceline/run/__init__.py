"""The run folder: what its files are called, what they hold, how they are written and read. No torch.

    spec.toml                the options of the run, each with where it came from
    env.json                 what ran where (`records.Environment`)
    summary.json             results (`records.Summary`); until the run ends, its status is "running"
    rank_N.jsonl             what rank N did, a record a line (`records.LINES`)
    node_NAME.jsonl          what a node was doing meanwhile, sampled twice a second (`records.NODE_LINES`)
    plan.json                pipeline: where the model was cut
    model.safetensors        the weights
    owner.json               the process that the run cannot do without (`liveness.Owner`)
    logs/rank_N.log          what rank N printed

`schema` generates JSON Schemas from the types; docs/schemas has them. `recorder.Recorder` writes a rank's file from any
training loop.
"""
