"""The import rules of docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.comm import table as transports
from paceline.strategies import table as strategies

SOURCE = Path(__file__).parent.parent / "src" / "paceline"
FILES = {".".join(("paceline", *p.relative_to(SOURCE).with_suffix("").parts)): p for p in SOURCE.rglob("*.py")}
# What each module may import from Paceline. The longest name that fits a module applies; a package may import itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "paceline.errors": (),
    "paceline.messages": ("errors",),
    "paceline.strict_json": (),
    "paceline.run": ("strict_json", "layout"),
    "paceline.layout": (),
    "paceline.control_groups": (),
    "paceline.disturbance": ("run.records",),
    "paceline.options": (),
    "paceline.export": ("errors", "messages", "run", "strict_json"),
    "paceline.spec": (
        "errors",
        "options",
        "own_code",
        "spec_checks",
        "spec_fill",
        "layout",
        "comm.table",
        "data.table",
        "models.table",
        "strategies.base",
        "strategies.table",
        "tasks.base",
        "tasks.table",
        "emulation.table",
        "emulation.measured",
    ),
    "paceline.spec_checks": ("errors", "comm.table", "data.table", "export.trackers"),
    "paceline.spec_fill": (
        "errors",
        "comm.table",
        "data.table",
        "strategies.table",
        "tasks.table",
        "emulation.table",
        "emulation.measured",
    ),
    "paceline.tasks": ("errors", "own_code", "plugins", "data.batch"),
    "paceline.tasks.base": ("errors",),
    "paceline.tasks.validations": ("errors", "data.course", "tasks.base"),
    "paceline.emulation": ("errors", "run", "data.table", "models.table"),
    # Counts the operations and messages of parts of a model.
    "paceline.emulation.counted": ("pipeline.partition", "pipeline.plan"),
    "paceline.emulation.parts": ("errors", "data.batch", "comm", "emulation", "pipeline", "tensor"),
    "paceline.own_code": ("errors",),
    "paceline.elastic": ("errors",),
    "paceline.checkpoint": ("errors", "run", "strict_json", "data.course"),
    # Goes from rank to rank.
    "paceline.checkpoint.carried": ("checkpoint", "strict_json", "data.course", "comm.base", "comm.words"),
    "paceline.loop": (
        "errors",
        "messages",
        "layout",
        "strict_json",
        "disturbance",
        "analysis.slow",
        "run",
        "spec",
        "checkpoint",
        "comm",
        "data.course",
        "data.sampler",
        "models.properties",
        "strategies.averager",
        "strategies.engine",
        "strategies.finite",
        "strategies.replicas",
        "export.trackers",
        "launch",
        "analysis.slow",
    ),
    "paceline.checkpoint.manifest": ("errors", "run.atomic", "strict_json", "data.course"),
    "paceline.data.course": ("strict_json",),
    "paceline.data": ("errors", "messages", "layout", "own_code", "plugins", "run.atomic"),
    "paceline.data.input": ("errors", "layout", "data", "comm.base"),
    "paceline.models": ("errors", "own_code", "plugins", "data.batch"),
    "paceline.plugins": ("errors",),
    "paceline.comm": ("errors", "messages", "layout", "plugins", "elastic.membership"),
    "paceline.collectives": ("comm", "layout"),
    "paceline.server": (
        "errors",
        "layout",
        "strict_json",
        "data.course",
        "comm.metered",
        "comm.shared_memory",
        "collectives.plan",
        "tasks.base",
        "tasks.validations",
    ),
    "paceline.pipeline": ("errors", "layout", "comm", "data.batch", "models.attention", "tasks.base", "tasks.scoring"),
    "paceline.pipeline.schedule": ("errors",),
    "paceline.tensor": ("errors", "layout", "own_code", "comm", "models.attention", "pipeline.tracing"),
    "paceline.strategies": (
        "__version__",
        "errors",
        "options",
        "plugins",
        "run",
        "strict_json",
        "layout",
        "own_code",
        "spec",
        "checkpoint",
        "data",
        "models",
        "tasks",
        "comm",
        "collectives",
        "server",
        "pipeline",
        "tensor",
        "emulation",
    ),
    "paceline.training": (
        "errors",
        "messages",
        "run",
        "elastic",
        "strict_json",
        "disturbance",
        "layout",
        "own_code",
        "spec",
        "checkpoint",
        "data",
        "comm",
        "strategies",
        "tasks",
        "analysis.slow",
    ),
    "paceline.lab": ("errors", "messages", "layout", "control_groups"),
    "paceline.analysis": (
        "errors",
        "run",
        "strict_json",
        "disturbance",
        "options",
        "spec",
        "pipeline.plan",
        "pipeline.schedule",
        "strategies.base",
        "strategies.table",
        "collectives.ring",
        "emulation.table",
    ),
    "paceline.report": (
        "errors",
        "run",
        "strict_json",
        "options",
        "analysis",
        "strategies.table",
        "emulation.table",
        # What predictions and advice say; nothing here predicts or searches.
        "predict.beside",
        "predict.forecast",
        "predict.limit_map",
        "predict.limits",
        "predict.outlook",
        "predict.ranges",
        "advise.advice",
    ),
    "paceline.report.table": (),
    "paceline.predict": (
        "errors",
        "layout",
        "options",
        "run",
        "strict_json",
        "spec",
        "analysis.runs",
        "analysis.statistics",
        "collectives",
        "data.table",
        "emulation.table",
        "emulation.counted",
        "lab.plan",
        "pipeline.devices",
        "pipeline.schedule",
        "server.layout",
        "strategies.bucket_layout",
        "strategies.overlap",
        "strategies.synchronous",
        "strategies.table",
    ),
    "paceline.predict.beside": ("analysis.runs", "data.table", "errors", "models.table", "predict", "spec"),
    # Builds the model, without values, to count its operations.
    "paceline.predict.anatomy": (
        "server.layout",
        "spec",
        "data",
        "models",
        "emulation.counted",
        "emulation.parts",
        "strategies.bucket_layout",
        "strategies.partitioned",
        "strategies.pipeline.planning",
        "strategies.setup",
        "strategies.synchronous",
    ),
    # Builds it to count its tensors.
    "paceline.predict.live": ("spec", "data", "strategies.setup", "predict.anatomy"),
    "paceline.advise": (
        "errors",
        "layout",
        "options",
        "run",
        "spec",
        "analysis",
        "bench",
        "lab.plan",
        "predict",
        "strategies.table",
    ),
    "paceline.chaos": ("errors", "run", "strict_json"),
    "paceline.watch": ("errors", "messages", "run", "strict_json", "analysis"),
    "paceline.bench": (
        "__version__",
        "errors",
        "messages",
        "layout",
        "run",
        "disturbance",
        "spec",
        "launch",
        "lab.plan",
        "data.prepare",
        "comm.table",
        "strategies.table",
        "analysis.claim_file",
        "analysis.setting",
        "report.table",
    ),
    "paceline.launch": (
        "errors",
        "messages",
        "run",
        "spec",
        "layout",
        "comm.table",
        "comm.seat",
        "lab.plan",
        "checkpoint.manifest",
    ),
    "paceline.launch.resume": (
        "errors",
        "run",
        "spec",
        "options",
        "launch",
        "data.course",
        "checkpoint.manifest",
    ),
    "paceline.launch.elastic": (
        "errors",
        "messages",
        "run",
        "spec",
        "launch",
        "elastic",
        "data.course",
        "strategies.options",
    ),
    "paceline.launch.joining": ("run", "strict_json", "data.course"),
    "paceline.launch.folder": ("errors", "run", "spec", "launch", "data.course"),
    "paceline.launch.recorded_rank": ("errors", "messages", "own_code", "run", "comm", "launch", "export.trackers"),
    "paceline.launch.memory_kills": ("control_groups", "run", "launch"),
    "paceline.launch.run": (
        "errors",
        "messages",
        "run",
        "spec",
        "layout",
        "launch",
        "own_code",
        "data.course",
        "data.prepare",
    ),
    "paceline.launch.supervise": ("errors", "messages", "run", "spec", "launch", "data.course", "checkpoint.manifest"),
    "paceline.launch.connect": ("errors", "launch", "comm"),
    "paceline.launch.agree": ("errors", "run", "spec", "comm", "launch.env"),
    "paceline.launch.clocks": ("run", "comm"),
    "paceline.launch.collect": ("run", "server"),
    "paceline.launch.meeting": ("errors", "spec", "comm", "launch", "server"),
    "paceline.launch.rank": (
        "errors",
        "messages",
        "layout",
        "own_code",
        "run",
        "strict_json",
        "spec",
        "comm",
        "launch",
        "checkpoint",
        "strategies.setup",
        "training",
    ),
    "paceline.launch.served_rank": (
        "errors",
        "messages",
        "own_code",
        "run",
        "strict_json",
        "spec",
        "comm",
        "launch",
        "data.course",
        "strategies",
        "training",
        "server",
    ),
    "paceline.launch.worker": ("errors", "messages", "run", "strict_json", "spec", "layout", "comm", "launch"),
    "paceline.launch.zygote": ("errors", "messages", "launch", "lab.kernel", "lab.spaces"),
    "paceline.launch.start": ("launch", "lab.spaces"),
    "paceline.launch.janitor": (),
    "paceline.cli": (
        "__version__",
        "errors",
        "messages",
        "own_code",
        "layout",
        "options",
        "run",
        "strict_json",
        "spec",
        "launch",
        "checkpoint",
        "lab",
        "advise",
        "analysis",
        "bench",
        "chaos",
        "export",
        "predict",
        "report",
        "watch",
        "data",
        "models.table",
        "comm.table",
        "comm.seat",
        "strategies.table",
        "emulation.table",
        "pipeline.plan",
        "pipeline.showing",
        "pipeline.sizes",
        "strategies.pipeline",
    ),
}
OPTIONS = {"tensor"}  # a strategy's option with the strategy's name
TABLES = [
    "errors",
    "run.folder",
    "run.liveness",
    "run.recorder",
    "run.schema",
    "layout",
    "own_code",
    "spec",
    "launch.usage",
    "lab.client",
    "data.prepare",
    "comm.table",
    "data.table",
    "models.table",
    "strategies.table",
    "strategies.engine",
    "collectives.choose",
    "emulation.table",
    "emulation.measured",
    "export.trackers",
    "export.trace",
    "report.table",
    "watch.server",
    "predict.forecast",
    "pipeline.schedule",
    "pipeline.partition",
    "pipeline.showing",
]


def imports(path: Path) -> set[str]:
    """Every module that the file imports, wherever in it; imports for type checkers only do not count."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES or name == "paceline.__version__" else node.module for name in inside}
    return found


def rule_for(name: str) -> str | None:
    return max((rule for rule in ALLOWED if name == rule or name.startswith(rule + ".")), key=len, default=None)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_module_imports_only_what_the_rules_allow(name: str) -> None:
    rule = rule_for(name)
    if rule is None:
        assert name in ("paceline.__init__", "paceline.__main__"), f"{name} has no import rule"
        return
    package = ".".join(name.split(".")[:2])
    allowed = [f"paceline.{other}" for other in ALLOWED[rule]]
    if rule == package and name != package:
        allowed.append(package)
    ours = {module for module in imports(FILES[name]) if module.startswith("paceline")}
    forbidden = {m for m in ours if not any(m == a or m.startswith(a + ".") for a in allowed)}
    assert not forbidden


def test_nothing_but_the_entry_points_imports_the_command_line() -> None:
    users = {name for name, path in FILES.items() if any(m.startswith("paceline.cli") for m in imports(path))}
    assert {name for name in users if not name.startswith("paceline.cli")} <= {"paceline.__main__"}


@pytest.mark.parametrize(
    ("library", "module"),
    [
        ("mpi4py", "paceline.comm.mpi"),
        ("zmq", "paceline.server.sockets"),
        ("pyroute2", "paceline.lab.links"),
        ("kaleido", "paceline.report.images"),
        ("tensorboardX", "paceline.export.trackers"),
        ("jinja2", "paceline.report.page"),
        ("scipy.fft", "paceline.analysis.statistics"),
        ("scipy.special", "paceline.analysis.statistics"),
        ("scipy.optimize", "paceline.predict.fit"),
    ],
)
def test_a_heavy_library_is_imported_in_one_file(library: str, module: str) -> None:
    users = {name for name, path in FILES.items() if any(f"{m}.".startswith(f"{library}.") for m in imports(path))}
    assert users == {module}


def test_only_comm_compares_names_of_transports() -> None:
    """Other packages ask for a transport's capabilities, so that a new transport needs no change in them."""
    found = set()
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and not name.startswith("paceline.comm"):
                sides = [node.left, *node.comparators]
                words = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
                if any(ast.unparse(side).endswith("transport") for side in sides) and words & transports.TABLE.keys():
                    found.add(f"{name}:{node.lineno}")
    assert not found


def names_in(node: ast.AST) -> set[str]:
    found = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
    return {value for value in found if isinstance(value, str) and value in strategies.TABLE}


def test_only_strategies_compare_names_of_strategies() -> None:
    """Other packages ask for a strategy's capabilities, so that a new strategy needs no change in them."""
    found = set()
    for name, path in FILES.items():
        if name.startswith(("paceline.strategies", "paceline.collectives")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Compare() | ast.match_case():
                    names = names_in(node if isinstance(node, ast.Compare) else node.pattern)
                case ast.Dict(keys=keys):
                    names = {n for key in keys if key for n in names_in(key)} - OPTIONS
                case ast.Tuple(elts=elts) | ast.List(elts=elts) | ast.Set(elts=elts):
                    only = all(isinstance(each, ast.Constant) and each.value in strategies.TABLE for each in elts)
                    names = names_in(node) if only else set()
                case ast.Attribute(attr="served" | "divided"):
                    names = {node.attr}
                case _:
                    continue
            if names:
                found.add(f"{name}:{node.lineno if hasattr(node, 'lineno') else 0} {names}")
    assert not found


def test_tables_and_the_spec_do_not_import_torch() -> None:
    code = "; ".join(f"import paceline.{name}" for name in TABLES) + "; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_package_run_knows_what_is_in_a_run_folder() -> None:
    """The names of its files, and the kinds of their lines: others ask `paceline.run.folder` and its records."""
    names = {
        "summary.json",
        "env.json",
        "owner.json",
        "plan.json",
        "bench.json",
        "model.safetensors",
        "spec.toml",
    }
    users = set()
    for name, path in FILES.items():
        if name.startswith("paceline.run."):
            continue
        tree = ast.parse(path.read_text())
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        users |= {
            (name, text) for text in texts if text in names or text in ("rank_", "node_") or text.endswith(".jsonl")
        }
    assert users == set()


def test_launcher_variables_are_read_in_one_file() -> None:
    words = ("SLURM_", "OMPI_COMM", "PMI_", "LOCAL_RANK", "MASTER_ADDR", "WORLD_SIZE")
    readers = {
        name
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(words)
    }
    assert readers == {"paceline.launch.env", "paceline.lab.node"}  # the lab sets one for its nodes


# What has no public name in torch, and why it is needed all the same; `X._name` is of any tensor, storage or module.
PRIVATE = {
    ("paceline.comm.process_group", "torch.distributed.ProcessGroupGloo._Options"): "chooses the network interface",
    ("paceline.comm.process_group", "X._timeout"): "the only way to give these options a time limit",
    ("paceline.comm.process_group", "X._devices"): "chooses the network interface",
    ("paceline.loop.spans", "torch.autograd.Variable._execution_engine"): "knows when a backward ends",
    ("paceline.pipeline.graph", "X._cdata"): "which values share memory",
    ("paceline.pipeline.graph", "X._version"): "which values are changed in place",
    ("paceline.pipeline.tracing", "X._buffers"): "puts back what a traced forward has changed",
    ("paceline.pipeline.tracing", "X._modules"): "puts back what a traced forward has changed",
    ("paceline.pipeline.tracing", "X._parameters"): "puts back what a traced forward has changed",
    ("paceline.pipeline.tracing", "torch._disable_dynamo"): "named in the docstring on what imports the compiler",
    ("paceline.pipeline.tracing", "torch._dynamo"): "keeps torch from importing its compiler, which takes a second",
    ("paceline.strategies.buckets", "X._cdata"): "whether a user holds a gradient's memory",
    ("paceline.strategies.buckets", "X._modules"): "whether layers were replaced, in every step",
    ("paceline.strategies.buckets", "X._parameters"): "whether parameters were replaced, in every step",
    ("paceline.strategies.buckets", "X._version"): "whether a parameter was changed during backward",
    ("paceline.strategies.buckets", "torch._C"): "whether a user holds a gradient's memory",
    ("paceline.strategies.buckets", "torch._C._storage_Use_Count"): "whether a user holds a gradient's memory",
    ("paceline.strategies.engine", "torch._foreach_mul_"): "scales many small tensors in one call",
    ("paceline.strategies.parameter_server.flat", "torch._foreach_copy_"): "copies many small tensors in one call",
    ("paceline.strategies.pipeline.engine", "torch._foreach_copy_"): "copies many small tensors in one call",
    ("paceline.tensor.layers", "X._conv_forward"): "computes a convolution with weights that are a part of the layer's",
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def torch_names(tree: ast.AST) -> dict[str, str]:
    """What the names that a file imports from torch stand for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            inside = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            found |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in inside}
            found |= {alias.name: alias.name for alias in inside}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_nothing_private_is_imported_from_torch() -> None:
    names = {(name, each) for name, path in FILES.items() for each in torch_names(ast.parse(path.read_text())).values()}
    assert {(name, each) for name, each in names if is_private(each)} == set()


def test_private_attributes_of_torch_are_these() -> None:
    tensor, layer = torch.empty(1), torch.nn.Conv2d(1, 1, 1, device="meta")
    options = torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    theirs = {name for each in (tensor, tensor.untyped_storage(), layer, options) for name in dir(each)}
    found = set()
    for file, path in FILES.items():
        tree = ast.parse(path.read_text())
        names = torch_names(tree)
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                and ast.unparse(n.value) == "self"}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                root, _, rest = ast.unparse(node).partition(".")
                if root in names:
                    found.add((file, f"{names[root]}.{rest}"))
                elif node.attr in theirs - own:
                    found.add((file, f"X.{node.attr}"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {(file, each) for each in re.findall(r"\btorch[\w.]*\._\w+", node.value)}
    assert found == PRIVATE.keys()


def test_no_pickle_anywhere() -> None:
    assert not {
        name for name, path in FILES.items() if imports(path) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    }
    calls = ("torch.load(", "allow_pickle=True", "broadcast_object_list", ".bcast(", ".allgather(", "Pickle")
    assert not {name for name, path in FILES.items() if any(call in path.read_text() for call in calls)}


def test_only_the_version_of_torch_that_is_tested_is_declared() -> None:
    """`constraints.txt` has the one that the tests run on."""
    top = SOURCE.parents[1]
    major, minor = re.findall(r"^torch==(\d+)\.(\d+)", (top / "constraints.txt").read_text(), re.M)[0]
    assert f'"torch>={major}.{minor},<{major}.{int(minor) + 1}"' in (top / "pyproject.toml").read_text()
    assert f"PyTorch is {major}.{minor}," in (top / "README.md").read_text()
    assert torch.__version__.startswith(f"{major}.{minor}.")


def test_files_are_small_and_say_what_they_are_for() -> None:
    for name, path in FILES.items():
        text = path.read_text()
        assert text.count("\n") <= 700, name
        assert ast.get_docstring(ast.parse(text)), name
