# Every target first sets up a virtual environment with the exact versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slurm soak check bench bench-startup bench-ps bench-data bench-lab bench-pipeline bench-checkpoints bench-prediction bench-advice clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mpi,dev]'
	touch $@

demo: $(READY)  ## train a CNN on one process and on two workers with four strategies, compare, and write a report
	$(BIN)/python examples/demo.py

test: $(READY)  ## run all tests on real threads, processes and MPI ranks, and in a real browser
	tests/browser/install.sh
	$(BIN)/python -m pytest -n auto --dist loadgroup

test-slurm: $(READY)  ## run scripts of paceline slurm on a real two-node Slurm, as root; installs Debian's if it is missing
	tests/slurm/run.sh $(BIN)/python -m pytest tests/slurm/check_slurm.py

soak: $(READY)  ## run long campaigns of kills and random options, at most 2 hours each; SOAK="labs --hours 0.1" for one
	$(BIN)/python tests/soak/soak.py $(SOAK)

check: $(READY)  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(READY)  ## compare with plain PyTorch and DDP; on an idle machine
	$(BIN)/python benchmarks/data_parallel.py

bench-startup: $(READY)  ## time a one-step training with 8 workers from command to end, beside torchrun
	$(BIN)/python benchmarks/startup.py

bench-ps: $(READY)  ## compare parameter servers with PyTorch's RPC tutorial and the ring
	$(BIN)/python benchmarks/parameter_server.py

bench-data: $(READY)  ## measure waiting for input, beside PyTorch's DataLoader, and the memory of 8 ranks, on CIFAR-10
	$(BIN)/paceline data get cifar10
	$(BIN)/python benchmarks/input.py
	$(BIN)/python benchmarks/memory.py

bench-lab: $(READY)  ## measure how close the lab's links come to their speed, and what sampling a node costs
	$(BIN)/python benchmarks/lab_links.py
	$(BIN)/python benchmarks/sampler.py

bench-checkpoints: $(READY)  ## what saving a checkpoint costs, beside torch.save and torch.distributed.checkpoint
	$(BIN)/python benchmarks/checkpoints.py

bench-prediction: $(READY)  ## how good predictions are: 310 runs, about two hours; Ctrl-C, and go on with the same command
	$(BIN)/python benchmarks/prediction.py experiments/prediction.toml

bench-advice: $(READY)  ## how good verdicts and steps to a loss are: about an hour and a half; Ctrl-C, and go on with the same command
	$(BIN)/python benchmarks/advice.py experiments/advice.toml
	$(BIN)/python benchmarks/steps_to_target.py

bench-pipeline: $(READY)  ## compare the pipeline with torch.distributed.pipelining, its cuts with others, its memory with the plan
	$(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/pipeline.py
	$(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/cuts.py
	$(BIN)/python benchmarks/pipeline_memory.py

clean:
	rm -rf $(VENV) runs soak .mypy_cache .ruff_cache .pytest_cache .hypothesis
