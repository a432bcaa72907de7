"""What to run: one frozen dataclass behind flags, TOML and Python, with all validation; no torch."""

import json
import textwrap
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import own_code
from paceline.comm import table as transports
from paceline.data import table as datasets
from paceline.emulation import table as emulation
from paceline.errors import UsageError, meant, refuse_pipe, unknown
from paceline.layout import Grid
from paceline.models import table as models
from paceline.options import LEARNING, LENGTH, NOTHING, PROBLEM, flag, option, plural
from paceline.spec_checks import (
    check_decay,
    check_device,
    check_emulated,
    check_mpi_io,
    check_strategy,
    check_tracking,
    check_validation,
)
from paceline.spec_fill import DEFAULT_LR, choose
from paceline.strategies import table as strategies
from paceline.strategies.base import Strategy
from paceline.tasks import table as tasks
from paceline.tasks.base import Task

# The options that say how long the learning rate grows.
WARMUP = ("warmup_epochs", "warmup_steps")


def warmup(options: Mapping[str, Any], scale: int) -> tuple[float, str]:
    """How long the learning rate grows, in epochs or steps: as given, else one epoch if it is scaled by workers."""
    if (steps := options.get("warmup_steps")) is not None:
        return steps, "step"
    epochs = options.get("warmup_epochs")
    return (float(scale > 1) if epochs is None else epochs), "epoch"


@dataclass(frozen=True)
class Common:
    """The options that every run has; a strategy's own come from the strategy."""

    model: str = option("mnist-cnn", f"network: a name from `paceline models`, or your own: {own_code.FORMS}",
                        affects=PROBLEM, label="")  # fmt: skip
    hidden: tuple[int, ...] | None = option(None, "sizes of the hidden layers of model mlp, such as 256,64",
                                            affects=PROBLEM, label="hidden layers of", least=1)  # fmt: skip
    dropout: float | None = option(None, "probability that dropout zeroes an activation; the model's own unless given",
                                   affects=PROBLEM, least=0.0, most=0.95)  # fmt: skip
    weights: str | None = option(None, "safetensors file with the initial weights; random ones unless given",
                                 affects=LEARNING)  # fmt: skip
    data: str = option("mnist-mini", "data set: a name from `paceline data list`, or your own: "
                       f"{datasets.OWN}", affects=PROBLEM, label="",
                       elsewhere=("dataset",))  # fmt: skip
    data_dir: str | None = option(None, "folder that already has the data set's files; a cache unless given",
                                  affects=PROBLEM, kept=False, label="data from")  # fmt: skip
    read: str = option("own", "how ranks get their samples: each reads the file (own), rank 0 reads it and scatters "
                       "(scatter), or all read it with MPI-IO (mpi-io)",
                       choices=("own", "scatter", "mpi-io"))  # fmt: skip
    image_size: int | None = option(None, "resize images to this many pixels a side; not resized unless given",
                                    affects=PROBLEM, label="images of", unit="pixel", least=1, most=4096)  # fmt: skip
    normalize: bool | None = option(None, "subtract each channel's mean and divide by its standard deviation; on for "
                                    "cifar10 and your own images unless given", affects=PROBLEM,
                                    label="normalization")  # fmt: skip
    augment: str = option("none", "random changes of training images: shift by up to an eighth of the size (crop), "
                          "also mirror (crop-flip)", affects=PROBLEM, label="augmentation",
                          choices=("none", "crop", "crop-flip"))  # fmt: skip
    validation: float = option(0.0, "part of the training set, from 0 to 0.5, that is kept for validation; the model "
                               "of the best validation is then tested", affects=LENGTH, kept=True, least=0.0,
                               most=0.5)  # fmt: skip
    evaluate_every: int | None = option(None, "validate every this many updates, and at the end; 0: at the end of each "
                                        "epoch, as it is unless given", affects=LENGTH, label="validated every",
                                        unit="step", least=0,
                                        elsewhere=("eval-every", "eval-steps", "eval-interval", "val-check-interval",
                                                   "validate-every"))  # fmt: skip
    best_by: str = option("loss", "figure by which the best validation is chosen: the loss or perplexity (lower is "
                          "better), accuracy (higher), mean absolute error (lower), or the metric of your own task "
                          "(higher)", affects=LEARNING, label="best by", metavar="loss|METRIC",
                          elsewhere=("monitor", "metric-for-best-model"))  # fmt: skip
    patience: int | None = option(None, "stop the training after this many validations in a row that are no better "
                                  "than the best; 0: never, as it is unless given", affects=LENGTH, least=0,
                                  elsewhere=("early-stopping", "early-stopping-patience"))  # fmt: skip
    task: str | None = option(None, "what the model is trained for: classification, language-model, regression, or "
                              f"your own loss: {own_code.FORMS}; that of the data unless given", affects=PROBLEM,
                              label="")  # fmt: skip
    strategy: str | None = option(None, "how the work is divided over workers; sequential for 1 worker, allreduce for "
                                  "more", label="", choices=tuple(strategies.TABLE))  # fmt: skip
    workers: int | None = option(None, "processes that compute gradients; 1 without a strategy, 2 for strategies that "
                                 "need several", unit="worker", least=1,
                                elsewhere=("nproc", "nproc-per-node", "world-size", "np", "n", "ranks", "num-processes",
                                           "devices"))  # fmt: skip
    transport: str = option("auto", "how bytes move between ranks", label="", choices=("auto", *transports.TABLE),
                            elsewhere=("backend", "dist-backend", "comm"))  # fmt: skip
    epochs: int = option(5, "passes over the training set", affects=LENGTH, unit="epoch", least=1,
                         elsewhere=("max-epochs", "num-epochs"))  # fmt: skip
    steps: int | None = option(None, "stop after this many updates, whatever --epochs says", affects=LENGTH,
                               unit="step", least=1, elsewhere=("max-steps", "iterations", "iters"))  # fmt: skip
    batch_size: int = option(128, "samples of an update for each worker (pipeline and tensor: for each replica)",
                             label="batch", least=1, elsewhere=("bs", "b", "batch"))  # fmt: skip
    global_batch: int | None = option(None, "samples of an update for all workers or replicas together; instead of "
                                      "--batch-size", label="global batch", least=1,
                                      elsewhere=("global-batch-size",))  # fmt: skip
    accumulate: int = option(1, "batches whose gradients are added up for one update, one after the other: as if the "
                             "batch were as many times larger, with the memory of one", label="accumulating",
                             unit="batch", least=1,
                             elsewhere=("gradient-accumulation-steps", "accumulate-grad-batches",
                                        "accumulation-steps"))  # fmt: skip
    optimizer: str = option("adam", "optimizer that updates the weights; adamw is Adam with decoupled weight decay",
                            affects=PROBLEM, label="", choices=tuple(DEFAULT_LR),
                            elsewhere=("opt", "optim"))  # fmt: skip
    lr: float | None = option(None, "learning rate for one worker; 0.01 for sgd and 0.001 for the others unless given",
                              affects=LEARNING, label="learning rate", least=0.0,
                              elsewhere=("learning-rate", "rate"))  # fmt: skip
    momentum: float = option(0.9, "SGD momentum", affects=LEARNING, least=0.0, most=1.0)
    weight_decay: float = option(0.0, "weight decay: an L2 penalty, decoupled from the gradient for adamw (0.01 unless "
                                 "given)", affects=LEARNING, least=0.0,
                                 elsewhere=("wd", "l2"))  # fmt: skip
    clip_norm: float | None = option(None, "scale a gradient with a larger norm than this down to it; the norm is that "
                                     "of the whole model; 0: any norm", affects=LEARNING,
                                     label="gradient norm at most", least=0.0,
                                     elsewhere=("clip", "max-grad-norm", "gradient-clip-val", "grad-clip",
                                                "clip-grad-norm"))  # fmt: skip
    scale_lr: bool = option(True, "multiply the learning rate by the number of workers or replicas (Goyal et al.); "
                            "off with --global-batch", label="learning-rate scaling")  # fmt: skip
    warmup_epochs: float | None = option(None, "epochs over which the learning rate grows: to the scaled one from that "
                                         "of one worker, or from 0 if it is not scaled; unless given, 1 if it is "
                                         "scaled, else 0", affects=LEARNING, label="warm-up of", unit="epoch",
                                         least=0.0, elsewhere=("warmup",))  # fmt: skip
    warmup_steps: int | None = option(None, "the same in updates; instead of --warmup-epochs", affects=LEARNING,
                                      label="warm-up of", unit="step", least=0,
                                      elsewhere=("warmup-iters",))  # fmt: skip
    decay: str = option("cosine", "how the learning rate falls after warm-up: along a cosine or a line, to 0 at the "
                        "end; or by --decay-factor every --decay-every epochs (step)", affects=LEARNING,
                        choices=("none", "cosine", "linear", "step"),
                        elsewhere=("scheduler", "lr-scheduler", "sched", "lr-schedule"))  # fmt: skip
    decay_every: float | None = option(None, "epochs, counted from the first, after which --decay step lowers the "
                                       "learning rate, again and again", affects=LEARNING, label="decay every",
                                       unit="epoch", least=0.001,
                                       elsewhere=("lr-step-size", "step-size", "decay-epochs"))  # fmt: skip
    decay_factor: float | None = option(None, "what --decay step multiplies the learning rate by; 0.1 unless given",
                                        affects=LEARNING, least=0.0, most=1.0,
                                        elsewhere=("gamma", "lr-gamma", "decay-rate"))  # fmt: skip
    compute: str = option("real", "compute gradients (real), or compute none and let each batch take as long as "
                          "emulated:SECONDS, emulated:DEVICE (from `paceline models --devices`) or emulated:RUN_FOLDER "
                          "says", affects=PROBLEM, label=emulation.in_words)  # fmt: skip
    shrink: int = option(1, "emulated compute: divide the size of gradients and weights by this; for links that are "
                         "as many times slower", affects=PROBLEM,
                         label=lambda times: f"gradients {times:,} times smaller" if times > 1 else "",
                         least=1, most=10_000)  # fmt: skip
    device: str = option("auto", "device that computes; auto takes a GPU where there is one", affects=PROBLEM,
                         kept=False, label="", choices=("auto", "cpu", "cuda"))  # fmt: skip
    dtype: str = option("float32", "number format of weights and gradients", affects=PROBLEM, label="",
                        choices=("float32", "float64"))  # fmt: skip
    precision: str = option("full", "number format that the model computes in: that of the weights (full), or bfloat16 "
                            "where torch.autocast uses it (bf16)", affects=PROBLEM, choices=("full", "bf16"),
                            elsewhere=("amp", "mixed-precision", "bf16"))  # fmt: skip
    threads: int | None = option(None, "threads of each worker; cores divided by workers unless given", unit="thread",
                                least=1, elsewhere=("num-threads", "omp-num-threads", "cpus-per-task"))  # fmt: skip
    seed: int = option(0, "random seed of initial weights, shuffles and dropout", affects=NOTHING, kept=True, least=0,
                       most=2**32 - 1)  # fmt: skip
    timeout: float = option(120.0, "seconds that a rank waits for another before it gives up", affects=NOTHING,
                            unit="s", least=0.1)  # fmt: skip
    test: bool = option(True, "evaluate the trained model on the test set at the end", affects=LENGTH)
    log_every: int = option(10, "print a line every this many updates; 0: never", affects=NOTHING, least=0,
                            elsewhere=("log-interval", "print-freq"))  # fmt: skip
    resume: str = option("auto", "continue an incomplete run: the one called --name, else the newest in --output-dir "
                         "with the same options (auto); the one in this folder, or from this checkpoint (PATH); or "
                         "none (never)", affects=NOTHING, metavar="auto|never|PATH",
                         elsewhere=("resume-from", "ckpt-path", "resume-from-checkpoint"))  # fmt: skip
    checkpoint_every: int | None = option(None, "save a checkpoint every this many updates; 0: by --checkpoint-seconds "
                                   "alone; 100 with parameter servers and 0 without unless given", affects=NOTHING,
                                   unit="update", least=0, formerly="snapshot_every",
                                   elsewhere=("save-steps", "save-interval", "save-every"))  # fmt: skip
    checkpoint_seconds: float = option(600.0, "save a checkpoint every this many seconds; 0: never", affects=NOTHING,
                                       unit="s", least=0.0)  # fmt: skip
    keep_checkpoints: int = option(2, "how many of the latest checkpoints are kept", affects=NOTHING, least=1,
                                   elsewhere=("save-total-limit",))  # fmt: skip
    on_nan: str = option("stop", "if the loss or a gradient is not finite: end the training before the update (stop), "
                         "or make no update in this step (skip, at most 10 in a row)", affects=NOTHING,
                         choices=("stop", "skip"))  # fmt: skip
    output_dir: str = option("runs", "folder in which the run folder is made", affects=NOTHING,
                             elsewhere=("out", "output", "log-dir", "logdir", "save-dir"))  # fmt: skip
    tensorboard: bool = option(False, "also write events for TensorBoard into the run folder, as it trains",
                               affects=NOTHING)  # fmt: skip
    name: str | None = option(None, "name of the run folder; made from the options and the time unless given",
                              affects=NOTHING)  # fmt: skip

    @property
    def method(self) -> Strategy:
        """The strategy, with what it can do."""
        assert self.strategy is not None, "resolve first"
        return strategies.TABLE[self.strategy]

    @property
    def objective(self) -> Task:
        """The task: what the model is trained for; that of the data unless given."""
        return tasks.describe(self.task or tasks.USUAL[datasets.kind_of(self.data)])

    @property
    def names(self) -> list[str]:
        """The options that this run has."""
        return [name for name in FIELDS if name not in OWN or name in self.method.names]

    def values(self) -> dict[str, Any]:
        """The options that this run has, as JSON and TOML have them."""
        found = {name: getattr(self, name) for name in self.names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @property
    def shares(self) -> int:
        """The workers or replicas that the samples of an update are divided over."""
        return self.method.shares(vars(self))

    @property
    def update_batch(self) -> int:
        """Samples of one update."""
        return self.global_batch or self.batch_size * self.shares * self.accumulate

    @property
    def lr_scale(self) -> int:
        """What the learning rate of one worker is multiplied by."""
        return self.shares if self.scale_lr else 1

    @property
    def warmup(self) -> tuple[float, str]:
        """How long the learning rate grows, in epochs or steps, and which of them."""
        return warmup(vars(self), self.lr_scale)

    @property
    def grid(self) -> Grid:
        """The workers as replicas of a model, each one divided into stages or shards where the strategy says so."""
        return self.method.grid(vars(self))

    @property
    def carrier(self) -> transports.Transport:
        """The transport, with what it can do."""
        return transports.TABLE[self.transport]

    @property
    def emulated(self) -> bool:
        """Whether ranks wait as long as a device would compute, and train nothing."""
        return self.compute != emulation.REAL

    @property
    def reads(self) -> bool:
        """Whether the data set is opened: emulated compute needs its size alone, which a user's own do not tell."""
        return not self.emulated or datasets.describe(self.data) is None

    @property
    def ranks(self) -> int:
        """Processes: servers come first, then workers."""
        assert self.workers is not None, "resolve first"
        return self.workers + self.method.servers(vars(self))

    def input_shape(self, data: datasets.DataInfo) -> tuple[int, ...]:
        """The shape of one sample as the model is given it; of images: channels, height and width."""
        return (data.shape[0], self.image_size, self.image_size) if self.image_size else data.shape

    def validation_samples(self, data: datasets.DataInfo) -> int:
        return round(data.train * self.validation)


# The options of strategies, and all options, each as a dataclass field with its type.
OWN = strategies.options()
_COMMON = {f.name: (f, kind) for f, kind in zip(fields(Common), typing.get_type_hints(Common).values(), strict=True)}
if both := _COMMON.keys() & OWN:
    raise UsageError(f"{min(both)} is an option of every run: a strategy cannot have one of that name")
FIELDS: dict[str, Field[Any]] = {name: f for name, (f, _) in (_COMMON | OWN).items()}
KINDS: dict[str, Any] = {name: kind for name, (_, kind) in (_COMMON | OWN).items()}

if TYPE_CHECKING:

    class RunSpec(Common):
        """One training run. Values left at None are chosen by `resolve`, which says why."""

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    RunSpec = make_dataclass(
        "RunSpec",
        [(name, kind, field(default=f.default, metadata=f.metadata)) for name, (f, kind) in OWN.items()],
        bases=(Common,),
        namespace={"__doc__": "One training run. Values left at None are chosen by `resolve`, which says why."},
        frozen=True,
    )
    RunSpec.__module__ = __name__


@dataclass(frozen=True)
class World:
    """The ranks that a launcher has started already: how many, and who started them."""

    size: int
    launcher: str


@dataclass(frozen=True)
class Resolved:
    """A complete, valid spec, and where each value came from."""

    spec: RunSpec
    sources: Mapping[str, str]
    given: frozenset[str] = frozenset()  # the sources that are somebody's words; the others are our own reasons
    verbose: bool = False

    def introduction(self) -> list[str]:
        """What will be run, for people: the learning rate, what was asked for, what was derived; all if `verbose`."""
        by_source = dict[str, list[str]]()
        for name in self.spec.names:
            value, source = getattr(self.spec, name), self.sources[name]
            shown = "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            if not self.verbose and source not in self.given:
                if value is None or source == "default" or name == "lr":
                    continue
                source = "derived"
            by_source.setdefault(source, []).append(f"{name} {shown}")
        order = sorted(by_source, key=lambda source: (source not in self.given, source == "default"))
        width = min(24, max(map(len, by_source), default=0))
        rows = [f"  {source:<{width}}  {', '.join(by_source[source])}" for source in order]
        lines = [line for row in rows for line in _wrap(row, " " * (width + 4))]
        lines = [line if line.startswith(" ") else f"  {line}" for line in lines]
        rate = [] if self.spec.emulated else [f"  {self._learning_rate()}"]
        rest = [] if self.verbose else ["  all other options have their defaults (--verbose shows them)"]
        return [self._heading(), *rate, *lines, *rest]

    def _learning_rate(self) -> str:
        """What the optimizer is given, which is not what --lr says where that is scaled by the workers."""
        spec = self.spec
        assert spec.lr is not None
        text = f"learning rate {spec.lr * spec.lr_scale:.4g}"
        if spec.lr_scale > 1:
            who = "replicas" if spec.method.part else "workers"
            text += f" ({spec.lr:g} x {spec.lr_scale} {who}; --no-scale-lr keeps {spec.lr:g})"
        length, unit = spec.warmup
        if length:
            grown = f"{length:g} {unit if length == 1 else plural(unit)}"
            text += f", reached after {grown}{' from 0' if spec.lr_scale == 1 else ''}"
        if spec.decay == "step":
            often = "epoch" if spec.decay_every == 1 else f"{spec.decay_every:g} epochs"
            return f"{text}, multiplied by {spec.decay_factor:g} every {often}"
        falls = {"none": "", "cosine": ", then falling to 0 along a cosine", "linear": ", then falling to 0 linearly"}
        return text + falls[spec.decay]

    def _heading(self) -> str:
        spec = self.spec
        how = "" if spec.ranks == 1 else f", {spec.transport}"
        smaller = f", gradients {spec.shrink} times smaller" if spec.shrink > 1 else ""
        mark = f"Emulated compute ({spec.compute.removeprefix(emulation.PREFIX)}{smaller}): " if spec.emulated else ""
        who = f"{spec.method.workers(spec)} {spec.method.batches(spec)}"
        return f"{mark}{spec.model} on {spec.data}: {spec.strategy}, {who}{how}"

    def lines(self) -> list[str]:
        """TOML with the source of each value as a comment."""
        rows = [(name, toml(getattr(self.spec, name)), printable(self.sources[name])) for name in self.spec.names]
        width = max(len(f"{name} = {value}") for name, value, _ in rows if value)
        return [
            f"{f'{name} = {value}':<{width}}  # {source}" if value else f"# {name}: not set ({source})"
            for name, value, source in rows
        ]


# What other tools call our options: by their name, ours.
ELSEWHERE = {other: name.replace("_", "-") for name, f in FIELDS.items() for other in f.metadata["elsewhere"]}
# What options were called in earlier versions: by that name, their name now.
FORMERLY = {f.metadata["formerly"]: name for name, f in FIELDS.items() if f.metadata["formerly"]}
# What other tools have and this has not, and what to know instead.
ABSENT = {"num-workers": "every rank loads its samples in a thread of its own; workers are the ranks that train"}


# How the source of a config file's values begins.
CONFIG = "config file"


def read_config(path: str) -> dict[str, Any]:
    """The values of a TOML file; keys are the flags' names, with - or _."""
    refuse_pipe(path, "the config file")
    try:
        with Path(path).open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{CONFIG} {path} is not valid TOML: {error}") from error
    known = {key: _known(key, f"{CONFIG} {path}") for key in values}
    twice = [key for key, name in known.items() if list(known.values()).count(name) > 1]
    if twice:
        raise UsageError(f"{CONFIG} {path} has a key twice: {', '.join(twice)}")
    return {name: values[key] for key, name in known.items()}


def resolve(
    *layers: tuple[str, Mapping[str, Any]], world: World | None = None, here: bool = True, one_machine: bool = True
) -> Resolved:
    """Put layers of values (source, values) over the defaults, later ones winning; fill in the rest; check it all.

    `here` is false for a run that other machines will start later: this one need not have their GPUs. `one_machine`
    is false if ranks may be on several, or on nodes of a lab.
    """
    values: dict[str, Any] = {name: f.default for name, f in FIELDS.items()}
    sources = dict.fromkeys(FIELDS, "default")
    for source, layer in layers:
        for key, value in layer.items():
            name = _known(key, source)
            values[name] = _checked(name, value, source)
            sources[name] = source
    given = frozenset(source for source, _ in layers)
    choose(values, sources, world, one_machine=one_machine)
    for source, layer in layers:
        if source.startswith(CONFIG):
            _drop_foreign_defaults(values, sources, source, layer)
    spec = RunSpec(**values)
    _check_own(spec, sources, given)
    _check_together(spec, world, here)
    return Resolved(spec, sources, given)


def _drop_foreign_defaults(
    values: dict[str, Any], sources: dict[str, str], source: str, layer: Mapping[str, Any]
) -> None:
    """Ignore a config file's options of another strategy that have their defaults, as those of a spec.toml may."""
    theirs: dict[str, Any] = {name: f.default for name, f in FIELDS.items()} | dict(layer)
    usual = strategies.TABLE[theirs["strategy"]].fill(theirs) if theirs["strategy"] and theirs["workers"] else {}
    for name in OWN.keys() - set(strategies.TABLE[values["strategy"]].names):
        default = FIELDS[name].default
        if sources[name] == source and values[name] in (default, usual.get(name)):
            values[name], sources[name] = default, "default"


def _check_own(spec: RunSpec, sources: Mapping[str, str], given: frozenset[str]) -> None:
    """Refuse options that somebody has given and the strategy does not have."""
    for name in OWN:
        if sources[name] in given and name not in spec.method.names:
            having = strategies.having(name)
            why = "" if sources["strategy"] in given else f", the {sources['strategy']},"
            raise UsageError(
                f"{sources[name]}: strategy {spec.strategy}{why} has no {flag(name)}: leave it out, or use --strategy "
                f"{' or '.join([', '.join(having[:-1]), having[-1]]) if len(having) > 1 else having[0]}"
            )


def _known(key: str, source: str) -> str:
    name = key.replace("-", "_")
    name = FORMERLY.get(name, name)
    if name not in FIELDS:
        raise UsageError(
            f"{source}: unknown key {key!r}{meant(name, FIELDS, ELSEWHERE, ABSENT)} (allowed: {', '.join(FIELDS)})"
        )
    return name


def _checked(name: str, value: Any, source: str) -> Any:
    """The value as its field's type, or an error that says what the field takes."""
    meta, hint, shown = FIELDS[name].metadata, KINDS[name], flag(name)
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in kinds:
        return None
    if kinds[0] == tuple[int, ...]:
        items = value if isinstance(value, list | tuple) else None
        if not items or not all(type(item) is int and item >= meta["least"] for item in items):
            raise UsageError(f"{source}: {shown} is {value!r}; it takes whole numbers of at least 1, such as 256,64")
        return tuple(items)
    if kinds[0] is float and type(value) is int and abs(value) < 10**300:
        value = float(value)
    if type(value) is not kinds[0]:
        expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kinds[0]]
        raise UsageError(f"{source}: {shown} is {value!r}; it takes {expected}")
    if meta["choices"] and value not in meta["choices"]:
        error = unknown(shown[2:].replace("-", " "), value, meta["choices"])
        raise UsageError(f"{source}: {error}")
    least, most = meta["least"], meta["most"]
    if (least is not None and not value >= least) or (most is not None and not value <= most) or value == float("inf"):
        limits = f"of at least {least:g}" if most is None else f"from {least:g} to {most:.15g}"
        if value == float("inf"):
            limits = "that are finite"
        raise UsageError(f"{source}: {shown} is {value}; it takes numbers {limits}")
    return value


def _check_together(spec: RunSpec, world: World | None, here: bool) -> None:
    """What no field can know alone."""
    assert spec.workers is not None
    model, data = models.describe(spec.model), datasets.describe(spec.data)
    if data is not None:
        check_data(spec, data)
    if spec.hidden and not (model and model.hidden):
        raise UsageError(f"--hidden is for the mlp; model {spec.model} has fixed layers")
    if spec.read == "mpi-io":
        check_mpi_io(spec)
    if spec.read == "scatter" and spec.carrier.moves_gpu_tensors:
        raise UsageError(
            f"--read scatter with --transport {spec.transport}: samples are scattered between CPUs; use --read own"
        )
    check_decay(spec)
    check_validation(spec)
    check_strategy(spec)
    if world and spec.ranks != world.size:
        servers = f" and --servers {spec.servers}" if spec.servers else ""
        raise UsageError(
            f"--workers {spec.workers}{servers}, but {world.launcher} {'has started' if here else 'would start'} "
            f"{world.size} ranks: "
            f"leave --workers out, or start as many ranks"
        )
    if spec.method.single and spec.workers > 1:
        parallel = ", ".join(name for name, each in strategies.TABLE.items() if not each.single)
        raise UsageError(f"strategy {spec.strategy} with {spec.workers} workers: use one worker, or one of {parallel}")
    if spec.weights is not None and not Path(spec.weights).is_file():
        why = "it is not a regular file" if Path(spec.weights).exists() else "there is no such file"
        raise UsageError(f"--weights {spec.weights}: {why}")
    if not spec.data.isprintable():
        raise UsageError(f"--data {spec.data!r} has characters that cannot be written into the run folder: rename it")
    if spec.data_dir is not None and not (spec.data_dir and Path(spec.data_dir).is_dir()):
        raise UsageError(f"--data-dir {spec.data_dir}: there is no such folder")
    if spec.name is not None and (not spec.name.strip(". ") or "/" in spec.name or not spec.name.isprintable()):
        raise UsageError(
            f"--name {spec.name!r}: give a folder name without slashes (see --output-dir) or control characters"
        )
    if "\0" in spec.output_dir or not spec.output_dir:
        raise UsageError(f"--output-dir {spec.output_dir!r}: the path of a folder is expected")
    check_device(spec, here=here)
    check_emulated(spec)
    check_tracking(spec, here=here)
    spec.carrier.check_installed(started=world is not None, here=here)
    if spec.carrier.by_mpiexec and world and world.launcher not in ("mpiexec", "srun"):
        raise UsageError(
            f"--transport {spec.transport} under {world.launcher}: its ranks are not MPI's and would each train alone; "
            f"start with mpiexec, or leave --transport out"
        )


def check_data(spec: RunSpec, data: datasets.DataInfo) -> None:
    """What depends on the data set: before any process starts where its size is known, else as soon as it is loaded."""
    _check_task(spec, data)
    if data.kind != "images":
        _refuse_image_options(spec, data)
    models.check_fits(spec.model, spec.input_shape(data))
    if spec.normalize and data.mean is None:
        raise UsageError(f"--normalize: the means of {data.name} are not known; leave it out")
    if spec.validation and not spec.validation_samples(data):
        raise UsageError(f"--validation {spec.validation:g} of {data.train} samples is none: give a larger part, or 0")
    samples = data.train - spec.validation_samples(data)
    if spec.update_batch > samples:
        who = f"{'replica' if spec.method.part else 'worker'}{'s' if spec.shares > 1 else ''}"
        if spec.global_batch:
            batch, lower = f"--global-batch {spec.global_batch}", "it"
        else:
            times = f" x {spec.accumulate} batches each" if spec.accumulate > 1 else ""
            batch = f"a global batch of {spec.batch_size} x {spec.shares} {who}{times} = {spec.update_batch} samples"
            lower = "--batch-size, --workers or --accumulate" if times else "--batch-size or --workers"
        raise UsageError(f"{batch} is larger than the training set of {spec.data} ({samples}): lower {lower}")


def _check_task(spec: RunSpec, data: datasets.DataInfo) -> None:
    """Refuse data that do not fit the task or the model."""
    model, numbers = models.describe(spec.model), data.target_dtype.startswith("float")
    if model and {model.takes, data.kind} == {"images", "tokens"}:
        fitting = [name for name, each in models.TABLE.items() if each.takes == data.kind]
        raise UsageError(f"model {spec.model} takes {model.takes}, but {spec.data} has {data.kind}: use one of "
                         f"{', '.join(fitting)}, or your own")  # fmt: skip
    found = "floating-point targets" if numbers else "one class for each sample"
    if not numbers and data.target_shape:
        found = f"integer targets of shape {list(data.target_shape)}"
    fits = {
        tasks.CLASSIFICATION: not numbers and not data.target_shape,
        tasks.LANGUAGE_MODEL: not numbers and bool(data.target_shape),
        tasks.REGRESSION: numbers,
    }
    if not fits.get(spec.objective, True):
        better = next(task.name for task, fit in fits.items() if fit)
        raise UsageError(f"--task {spec.task}: {spec.data} has {found}; use --task {better}, or a function of your own")
    if data.kind not in spec.objective.kinds:
        raise UsageError(
            f"--task {spec.task} is for {' and '.join(spec.objective.kinds)}, but {spec.data} has {data.kind}"
        )


def _refuse_image_options(spec: RunSpec, data: datasets.DataInfo) -> None:
    given = {"--image-size": spec.image_size, "--normalize": spec.normalize, "--augment": spec.augment != "none"}
    for shown, used in given.items():
        if used:
            raise UsageError(f"{shown} is for images, but {spec.data} has {data.kind}: leave it out")


def _wrap(text: str, indent: str) -> list[str]:
    """Lines of at most 110 characters; a path stays in one piece."""
    return textwrap.wrap(text, 110, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def printable(text: str) -> str:
    """As part of one line: what would end it is replaced."""
    return "".join(c if c.isprintable() else "?" for c in text)


def toml(value: Any) -> str | None:
    """An option's value as a TOML file has it; None if there is none."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return json.dumps(list(value))
    # JSON's strings, numbers and booleans are TOML's, but for two details of strings.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
