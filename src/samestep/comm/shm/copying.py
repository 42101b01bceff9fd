"""Copying bytes between tensors and mapped memory: on the host by `memmove`, without the interpreter's lock."""

import ctypes

import torch
from torch import Tensor

from samestep.comm.shm.segment import Segment


def write(segment: Segment, at: int, tensor: Tensor, start: int, size: int) -> None:
    """Copies some bytes of a contiguous tensor to a place in the segment."""
    if size == 0:
        return
    if tensor.is_cpu:
        ctypes.memmove(segment.address + at, tensor.data_ptr() + start, size)
    else:
        _bytes_at(segment, at, size).copy_(_bytes_of(tensor, start, size))


def read(segment: Segment, at: int, tensor: Tensor, start: int, size: int) -> None:
    """Copies bytes at a place in the segment to a place in a contiguous tensor."""
    if size == 0:
        return
    if tensor.is_cpu:
        ctypes.memmove(tensor.data_ptr() + start, segment.address + at, size)
    else:
        _bytes_of(tensor, start, size).copy_(_bytes_at(segment, at, size))


def copy(target: Tensor, at: int, tensor: Tensor, start: int, size: int) -> None:
    """Copies bytes of a contiguous tensor to a place in another of the same device."""
    if size == 0:
        return
    if tensor.is_cpu:
        ctypes.memmove(target.data_ptr() + at, tensor.data_ptr() + start, size)
    else:
        _bytes_of(target, at, size).copy_(_bytes_of(tensor, start, size))


def _bytes_of(tensor: Tensor, start: int, size: int) -> Tensor:
    """Some bytes of a contiguous tensor, as a view."""
    return tensor.view(-1).view(torch.uint8)[start : start + size]


def _bytes_at(segment: Segment, at: int, size: int) -> Tensor:
    """Bytes of the segment, as a view."""
    return torch.frombuffer(segment.memory, dtype=torch.uint8, count=size, offset=at)
