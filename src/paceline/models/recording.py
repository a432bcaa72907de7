"""Running a constructor on tensors without storage, and writing down what it does to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tag, Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.errors import UsageError
from paceline.models.draws import BY_VALUE, go_past
from paceline.models.replay import Op, Ref, Tape, view

_CPU, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
_BLANK = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted),
    *(_aten.new_empty, _aten.new_empty_strided),
}
# These write all of their first argument, whatever was in it.
_OVERWRITES = {
    *(_aten.copy_, _aten.fill_, _aten.zero_, _aten.uniform_, _aten.normal_, _aten.log_normal_, _aten.exponential_),
    *(_aten.cauchy_, _aten.geometric_, _aten.random_, _aten.bernoulli_),
}
# Batch normalisation writes its statistics without saying so in its schema.
_UNDECLARED = {_aten.native_batch_norm: {"running_mean", "running_var"}}


class Recorder(TorchDispatchMode):
    """Under it all tensors are on the meta device, and the tape has what was done to them.

    The generator goes past what is drawn, so that whoever asks for its state, or sets it, finds it as it should be.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self._stand_ins: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch, which else imports its compiler; that takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            args, kwargs = tree_map_only(Tensor, self._on_meta, (args, kwargs or {}))
            if Tag.data_dependent_output in func.tags:
                return self._really(func, args, kwargs)
            if any(argument.name == "device" for argument in func._schema.arguments):
                kwargs["device"] = _META
            was = tree_map_only(Tensor, self.ref, (args, kwargs))  # it may give them another shape
            if Tag.nondeterministic_seeded in func.tags:
                state = (kwargs.get("generator") or torch.default_generator).get_state()
                out = self._draw(func, args, kwargs)
            else:
                state, out = None, self._without_values(func, args, kwargs)
            self._note(func, was[0], was[1], _tensors(out), state)
            return out

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError:  # what comes out, or its size, is a matter of values
            if func._schema.is_mutable:
                raise
            out = self._really(func, args, kwargs)
            return tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=_META), out)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        # What draws into a tensor need not be asked for its result: torch would import its compiler for that.
        out = args[0] if func.overloadpacket in _OVERWRITES else func(*args, **kwargs)
        if func.overloadpacket in BY_VALUE:
            self._really(func, args, kwargs)
        else:
            go_past(func, args, _on_cpu(kwargs), _tensors(out)[0])
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: list[Tensor], state: Tensor | None) -> None:
        """Write an operation down, if it gave any storage values."""
        results = [self.ref(tensor) for tensor in out]
        old = {ref.key for ref in _refs((args, kwargs))}
        new = {ref.key for ref in results} - old
        if func.overloadpacket in _BLANK:
            self.tape.blank |= new
            return
        read: set[int] = set()
        wrote, made = set(new), set(new)
        for number, argument in enumerate(func._schema.arguments):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            written = written or argument.name in _UNDECLARED.get(func.overloadpacket, ())
            over = written and (argument.is_out or func.overloadpacket in _OVERWRITES)
            for ref in _refs(given):
                (made if over and self._is_all(ref) else read).add(ref.key)
                if written:
                    wrote.add(ref.key)
        if not wrote or Tag.inplace_view in func.tags:
            return
        kwargs = _on_cpu(kwargs)
        if not old and any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs["dtype"] = results[0].dtype  # not what is the default when it is done again
        fresh = tuple(ref if ref.key in new else None for ref in results)
        self.tape.ops.append(Op(func, args, kwargs, fresh, frozenset(read), frozenset(wrote), frozenset(made), state))

    def ref(self, tensor: Tensor) -> Ref:
        storage = tensor.untyped_storage()
        self.tape.storages[storage._cdata] = storage
        return _ref(tensor)

    def _is_all(self, ref: Ref) -> bool:
        """Whether a view has every byte of its storage."""
        storage = self.tape.storages[ref.key]
        tensor = view(ref, storage)
        return tensor.nbytes == storage.nbytes() and bool(_aten.is_non_overlapping_and_dense(tensor))

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor that has values, such as one from a NumPy array."""
        if tensor.is_meta:
            return tensor
        real = tensor.untyped_storage()
        if real._cdata not in self._stand_ins:
            blank = torch.empty(real.nbytes(), dtype=torch.uint8, device=_META).untyped_storage()
            self._stand_ins[real._cdata] = (real, blank)
            self.tape.constants[blank._cdata] = real
        return view(_ref(tensor), self._stand_ins[real._cdata][1])

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The same, for a module to have."""
        blank = self._on_meta(tensor)
        return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank

    def real(self, tensor: Tensor) -> Tensor:
        """The tensor with the values that it would have by now."""
        return self.tape.value(self.ref(self._on_meta(tensor)))

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, self.real, (args, kwargs))
        return func(*args, **_on_cpu(kwargs))


_SAID: dict[Any, Any] = {
    vars(torch._C.TensorBase)[name].__get__: said
    for name, said in (("is_meta", False), ("is_cpu", True), ("device", _CPU))
}


class AsOnCpu(TorchFunctionMode):
    """Under it tensors on the meta device say that they are on the CPU, and can be looked into."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAID:
            return _SAID[func]
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            with _disable_current_modes():
                return _read_only(func(self._recorder.real(args[0]), *args[1:], **kwargs))
        if func in (Tensor.new, Tensor.new_tensor):  # which read what they are given only where it is to be real
            with _disable_current_modes():
                args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
        if func is Tensor.cpu:
            return args[0]
        if func is Tensor.to:
            args, kwargs = (args[0], *map(_moved, args[1:])), {name: _moved(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _refs(tree: Any) -> list[Ref]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Ref)]


def _ref(tensor: Tensor) -> Ref:
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError("a conjugated complex tensor cannot be followed; use resolve_conj()")
    key = tensor.untyped_storage()._cdata
    return Ref(key, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | {"device": _CPU} if "device" in kwargs else dict(kwargs)


def _moved(value: Any) -> Any:
    """Where a tensor is to be moved: the CPU is where it says it is."""
    return _META if isinstance(value, str | torch.device) and torch.device(value).type == "cpu" else value


def _read_only(seen: Any) -> Any:
    """What is written into a tensor's memory by NumPy would be lost."""
    if isinstance(seen, np.ndarray):
        seen.flags.writeable = False
    return seen
