"""Initial weights, made module by module: a rank can make those of its own part of a model, and no others.

Every module that holds parameters or buffers sets them in its own `reset_parameters()`, as the layers of torch.nn do,
or the model sets them in `init_module(module)`, which is called for each of its modules, after `reset_parameters`.
Both run with torch's generator seeded by the seed of the run and the name of the module. So what a module starts with
does not depend on which other modules are there, and all strategies start from the same weights.

A constructor can also set values elsewhere. Then only building the whole model gives them.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Set
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from paceline import own_code
from paceline.errors import UsageError

# Ranks that are threads share torch's random state.
RANDOM = threading.RLock()

Make = Callable[[], nn.Module]
Check = Callable[[nn.Module], None]


def module_seed(seed: int, name: str) -> int:
    """The 8 bytes of the BLAKE2b digest of "SEED/NAME", such as "0/layer1.0.conv1", as a little-endian number."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def build_whole(make: Make, seed: int, check: Check = lambda model: None) -> nn.Module:
    """The model on the CPU with the initial weights of every strategy; `check` may refuse it.

    Where they cannot be made module by module, they are those of `torch.manual_seed(seed); make()`.
    """
    with RANDOM:
        torch.manual_seed(seed)
        with _Constructor() as constructor:
            model = make()
        problems = constructor.problems(model)
        check(model)
        if problems:
            return model
        if any(_reset(model, module, path, seed) for path, module in reversed(list(model.named_modules()))):
            torch.manual_seed(seed)
            model = make()
            check(model)
        return model


class Deferred:
    """`model` is on the meta device, and `values` makes its initial values, a module at a time."""

    def __init__(self, model: nn.Module, seed: int, problems: dict[str, str]) -> None:
        self.model, self._seed, self._problems = model, seed, problems
        self._blank = copy.deepcopy(model)  # stays as it was built when layers of the model are changed
        # What several modules share gets its values from the first of them, as in `build_whole`.
        modules = reversed(list(self._blank.named_modules()))
        makers = {id(t): (path, key) for path, module in modules for key, t in _own(module).items()}
        self._makers = {
            f"{path}.{key}" if path else key: makers[id(tensor)]
            for path, module in self._blank.named_modules(remove_duplicate=False)
            for key, tensor in _own(module).items()
        }

    @property
    def names(self) -> Set[str]:
        """Of all parameters and buffers: all of their names."""
        return self._makers.keys()

    def check(self, given: Collection[str] = ()) -> None:
        """Refuse a model that cannot be initialised in parts; those `given` get their values otherwise."""
        found = [problem for name, problem in self._problems.items() if name not in given]
        if found:
            raise _refused("; ".join(found[:2]) + f"; and {len(found) - 2} more" * (len(found) > 2))

    def values(self, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Initial values of parameters and buffers, by any of their names.

        They come in an order that is the same everywhere, and belong to the caller: besides, only the memory of one
        module is used. torch's random state stays as it is.
        """
        wanted = set(wanted)
        assert wanted <= self.names, f"the model has no tensors {sorted(wanted - self.names)}"
        self.check(self._problems.keys() - wanted)
        by_module: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, (path, key) in self._makers.items():
            if name in wanted:
                by_module[path][key].append(name)
        for path, keys in by_module.items():
            module = self._blank.get_submodule(path)
            module.to_empty(device="cpu", recurse=False)
            problem = _reset(self._blank, module, path, self._seed)
            if problem:
                raise _refused(problem)
            made = _own(module)
            module.to_empty(device="meta", recurse=False)
            for key, names in keys.items():
                value = made.pop(key).detach()
                for name in names:
                    yield name, value


def defer(make: Make, seed: int, check: Check = lambda model: None) -> Deferred:
    """Build the model without storage, on the meta device; `check` may refuse it."""
    why = "strategies that split a model first build it without storage, on torch's meta device"
    with RANDOM, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            with torch.device("meta"), _Constructor() as constructor:
                model = make()
            problems = constructor.problems(model)
            check(model)
            return Deferred(model, seed, problems)
        except UsageError as error:
            if error.__cause__ is None:  # a name or an option that is wrong for every strategy
                raise
            raise UsageError(f"{error}; {why}") from error
        except Exception as error:
            raise UsageError(f"the model cannot be built: {own_code.reason(error)}; {why}") from error


def _refused(problem: str) -> UsageError:
    return UsageError(
        f"the model cannot be initialised in parts: {problem}. Set the values of a module's own parameters and buffers "
        f"in its reset_parameters(), or in a method init_module(module) of the model; or start from --weights FILE; "
        f"or use a strategy that does not split the model"
    )


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a module holds itself."""
    named = [*module.named_parameters(recurse=False, remove_duplicate=False),
             *module.named_buffers(recurse=False, remove_duplicate=False)]  # fmt: skip
    return dict(named)


def _takes(hook: Any, arguments: int) -> bool:
    """Whether a hook is there and takes no other arguments, with which a constructor may have called it."""
    try:
        return callable(hook) and len(inspect.signature(hook).parameters) == arguments
    except (TypeError, ValueError):  # some that are written in C do not tell
        return False


def _hooks(model: nn.Module, module: nn.Module) -> list[Callable[[], object]]:
    """What initialises a module, in this order."""
    reset: Any = getattr(module, "reset_parameters", None)
    init: Any = getattr(model, "init_module", None)
    return [*([reset] if _takes(reset, 0) else []), *([partial(init, module)] if _takes(init, 1) else [])]


def _reset(model: nn.Module, module: nn.Module, path: str, seed: int) -> str | None:
    """Give a module's own tensors their initial values; returns what is wrong where its hooks do not set them all."""
    own = _own(module)
    if not own or any(map(is_lazy, own.values())):
        return None
    with torch.no_grad():
        for tensor in own.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    with RANDOM, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(module_seed(seed, path))
        for hook in _hooks(model, module):
            hook()
    unset = [key for key, tensor in _own(module).items() if tensor.is_floating_point() and tensor.isnan().any()]
    return f"reset_parameters() of {_title(path, module)} does not set all of {', '.join(unset)}" if unset else None


def _title(path: str, module: nn.Module) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"


# These change no values.
_HARMLESS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
# Functions of torch.nn.init ask this, and do nothing on the meta device.
_ASKS = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_METADATA = bool | int | float | str | torch.Size | torch.dtype | torch.device | torch.layout


class _Constructor(TorchFunctionMode):
    """Sees what a constructor does to which tensor, and whether it does so in a hook that can be called again."""

    def __init__(self) -> None:
        super().__init__()
        # Of each tensor: whether what was done to it last was done in a hook of the module that holds it; in
        # init_module, of which model.
        self._last: dict[int, tuple[weakref.ref[Tensor], nn.Module | bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = isinstance(result, _METADATA) or (result is None and getattr(func, "__name__", "") == "__get__")
        if func == _ASKS or not (read or func in _HARMLESS):
            self._see(list(_tensors((args, kwargs))), list(_tensors(result)))
        return result

    def _see(self, taken: list[Tensor], made: list[Tensor]) -> None:
        frames = list(_frames(inspect.currentframe()))
        if any(frame.f_code.co_name == "_apply" for frame in frames):  # `module.to` and the like convert values
            for tensor in made:
                self._note(tensor, all(map(self._state, taken)) and self._state(taken[0]))
            return
        for tensor in made:  # a hook may give its module a new tensor
            self._note(tensor, any(frame.f_code.co_name == "reset_parameters" for frame in frames))
        for tensor in taken:
            self._note(tensor, _hook(tensor, frames))

    def _note(self, tensor: Tensor, hook: nn.Module | bool) -> None:
        self._last[id(tensor)] = weakref.ref(tensor), hook

    def _state(self, tensor: Tensor) -> nn.Module | bool:
        found, hook = self._last.get(id(tensor), (None, False))
        return hook if found and found() is tensor else False

    def problems(self, model: nn.Module) -> dict[str, str]:
        """Why which tensors of the model that was constructed cannot be initialised by hooks alone."""
        found = {}
        for path, module in model.named_modules(remove_duplicate=False):
            title, start = _title(path, module), f"{path}." if path else ""
            for key, tensor in _own(module).items():
                if not _hooks(model, module):
                    found[start + key] = f"{title} holds {key} and has no reset_parameters()"
                elif not is_lazy(tensor) and self._state(tensor) not in (True, model):
                    found[start + key] = f"the constructor sets {key} of {title} elsewhere"
                elif tensor.device.type not in ("cpu", "meta"):
                    found[start + key] = f"the constructor puts {key} of {title} on {tensor.device}"
            for key, value in vars(module).items():
                if isinstance(value, Tensor):
                    found[start + key] = f"{key} of {title} is a tensor, but no parameter and no buffer"
        return found


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def _hook(tensor: Tensor, frames: list[FrameType]) -> nn.Module | bool:
    """Whether a hook of the tensor's module is being called; of init_module, the model that has it."""
    for frame in frames:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals.get(name) for name in names]
        if code.co_name == "reset_parameters" and len(given) == 1 and _holds(given[0], tensor):
            return True
        if code.co_name == "init_module" and len(given) == 2 and _holds(given[1], tensor):
            model = given[0]
            return model if isinstance(model, nn.Module) else False
    return False


def _holds(module: object, tensor: Tensor) -> bool:
    return isinstance(module, nn.Module) and any(own is tensor for own in _own(module).values())


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | tuple | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(item)
