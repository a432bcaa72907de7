"""Train the 690,590-parameter CNN on real digits, alone and by two workers in four ways, and compare."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace

from paceline import RunSpec, Summary, train
from paceline.layout import cores

# One thread a worker, so that two workers have twice the cores of the first row. The second row is the honest rival:
# one process may use all cores, too.
ALONE = RunSpec(model="mnist-cnn", data="mnist-mini", epochs=2, threads=1, log_every=0)
CORES = cores()
RUNS = {
    "sequential, 1 thread": ALONE,
    f"sequential, {CORES} threads": replace(ALONE, threads=CORES),
    **{
        f"{strategy}, 2 workers": replace(ALONE, strategy=strategy, workers=2)
        for strategy in ("allreduce", "ring", "reduce-bcast", "gather")
    },
}
COLUMNS = ("read s", "update ms", "epoch s", "total s", "images/s", "speedup", "test loss", "test acc")


def row(summary: Summary, baseline: Summary) -> tuple[str, ...]:
    assert summary.images_per_second is not None
    assert baseline.images_per_second is not None
    return (
        f"{summary.read_seconds:.2f}",
        f"{1000 * (summary.update_seconds or 0):.1f}",
        f"{statistics.median(summary.epoch_seconds):.2f}",
        f"{summary.total_seconds:.2f}",
        f"{summary.images_per_second:,.0f}",
        f"{summary.images_per_second / baseline.images_per_second:.2f}",
        f"{summary.test_loss:.4f}",
        f"{summary.test_accuracy:.2%}",
    )


def main() -> None:
    print(
        f"mnist-cnn, 690,590 parameters, on 10,000 real digits (mnist-mini): {ALONE.epochs} epochs of Adam, "
        f"batch 128 a worker, {CORES} cores\n"
    )
    results: dict[str, Summary] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        for number, (name, spec) in enumerate(RUNS.items(), 1):
            print(f"  run {number} of {len(RUNS)}: {name} ...", end="", flush=True)
            start = time.perf_counter()
            results[name] = train(replace(spec, output_dir=folder))
            print(f" {time.perf_counter() - start:.1f} s", flush=True)
    baseline = results["sequential, 1 thread"]
    table = {name: row(summary, baseline) for name, summary in results.items()}
    width = max(map(len, table))
    print("\n" + " " * width + "".join(f"{column:>11}" for column in COLUMNS))
    for name, cells in table.items():
        print(f"{name:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
    print(
        "\nspeedup: images/s beside the first row. update: the whole step, median. total: reading to the test's result."
        "\nTwo workers take batches of 256 in all, so half as many updates: that, not the averaging, is why they end at"
        "\nanother accuracy than one; the four averagings train the same model."
    )


if __name__ == "__main__":
    main()
