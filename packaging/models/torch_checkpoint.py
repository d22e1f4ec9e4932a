"""Reads the tensors of a PyTorch checkpoint (`.pth`) into numpy arrays, without PyTorch.

Owns the legacy file format of torch.save before 1.6 (torch/serialization.py, `_legacy_save`): four pickles
(magic number, protocol version, byte order and sizes, the object), a pickled list of storage keys, then
each storage as an int64 element count and its raw little-endian elements. Does not know any model.

A pickle can name any callable, so only the few names that a state dict of tensors needs are let through.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001


class _StorageType(NamedTuple):
    dtype: str


class _Storage(NamedTuple):
    key: str
    dtype: str
    num_elements: int


class _TensorView(NamedTuple):
    """A tensor before its storage has been read: offset and stride count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild_tensor(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    backward_hooks: object,
) -> _TensorView:
    return _TensorView(storage, offset, shape, stride)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch", "FloatStorage"): _StorageType("<f4"),
    ("torch", "LongStorage"): _StorageType("<i8"),
}


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[(module, name)]
        except KeyError:
            raise pickle.UnpicklingError(
                f"the checkpoint names {module}.{name}, which is not allowed"
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _location, num_elements, view = pid
        if kind != "storage" or view is not None:
            raise pickle.UnpicklingError(f"unsupported persistent id of kind {kind!r} in the checkpoint")
        return _Storage(key, storage_type.dtype, num_elements)


def read_state_dict(data: bytes) -> dict[str, NDArray[Any]]:
    """The tensors of a legacy checkpoint that holds a flat state dict, by name, each contiguous.

    Raises pickle.UnpicklingError for any name beyond tensors, and ValueError for another format or a
    file that ends early.
    """
    stream = io.BytesIO(data)
    magic, protocol, system = (_TensorUnpickler(stream).load() for _ in range(3))
    if magic != MAGIC_NUMBER or protocol != PROTOCOL_VERSION or not system["little_endian"]:
        raise ValueError("not a legacy little-endian PyTorch checkpoint")
    views: dict[str, _TensorView] = _TensorUnpickler(stream).load()
    keys: list[str] = _TensorUnpickler(stream).load()
    storages = {view.storage.key: view.storage for view in views.values()}
    elements = {key: _read_storage(stream, storages[key]) for key in keys}
    return {name: _materialise(view, elements[view.storage.key]) for name, view in views.items()}


def _read_storage(stream: io.BytesIO, storage: _Storage) -> NDArray[Any]:
    num_elements = int.from_bytes(stream.read(8), "little")
    if num_elements != storage.num_elements:
        raise ValueError(f"storage {storage.key}: {num_elements} elements, expected {storage.num_elements}")
    raw = stream.read(num_elements * np.dtype(storage.dtype).itemsize)
    return np.frombuffer(raw, dtype=storage.dtype, count=num_elements)


def _materialise(view: _TensorView, elements: NDArray[Any]) -> NDArray[Any]:
    last = view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    # as_strided does not check bounds: an offset or stride from a bad file would read foreign memory.
    if min((view.offset, *view.shape, *view.stride)) < 0 or last >= elements.size:
        raise ValueError(f"a tensor reaches element {last} of a storage of {elements.size}")
    strides = tuple(step * elements.itemsize for step in view.stride)
    strided = np.lib.stride_tricks.as_strided(elements[view.offset :], view.shape, strides)
    return np.ascontiguousarray(strided).reshape(view.shape)  # ascontiguousarray makes a scalar 1-d
