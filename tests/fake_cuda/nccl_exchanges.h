// Who sends what to whom in each collective of the fake NCCL.
#pragma once
#include "nccl_kernel.h"

#include <ATen/ops/cat.h>

namespace fake_cuda::nccl {

inline Tensors flat_all(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(flat(tensor));
  return all;
}

struct Exchanges {
  int rank, size;

  std::vector<int> others() const {
    std::vector<int> ranks;
    for (int k = 1; k < size; ++k) ranks.push_back((rank + k) % size);
    return ranks;
  }

  Tensor reduced(Messages& got, const Reduction& reduction, const Tensor& own, int of = -1) const {
    const int64_t numel = own.numel();
    got[rank] = reduction.sent(own);
    Tensors parts, sums;
    for (int k = 0; k < size; ++k) {
      TORCH_CHECK(got.at(k).size() == own.nbytes(), "NCCL: ranks disagree on the size of a reduction");
      parts.push_back(values_of(got.at(k), own.scalar_type()));
    }
    if (of >= 0) return reduction(parts, of);
    for (int k = 0; k < size; ++k) {  // every rank adds each part in the same order
      Tensors slices;
      const int64_t begin = numel * k / size, end = numel * (k + 1) / size;
      for (const auto& part : parts) slices.push_back(part.slice(0, begin, end));
      sums.push_back(reduction(slices, k));
    }
    return at::cat(sums);
  }

  Exchange of_root(const Tensor& tensor, int root) const {
    Exchange e;
    const auto values = flat(tensor);
    if (rank == root) {
      for (int peer : others()) e.outs.push_back({peer, [=] { return bytes_of(values); }});
    } else {
      e.ins = {root};
      e.written = {values};
      e.finish = [=](Messages& got) { write(values, got.at(root)); };
    }
    return e;
  }

  Exchange all_reduced(const Tensor& tensor, const Reduction& reduction) const {
    const auto values = flat(tensor);
    Exchange e;
    for (int peer : others()) e.outs.push_back({peer, [=] { return reduction.sent(values); }});
    e.ins = others();
    e.written = {values};
    e.finish = [=, *this](Messages& got) { write(values, bytes_of(reduced(got, reduction, values))); };
    return e;
  }

  Exchange reduced_to(int root, const Tensor& tensor, const Reduction& reduction) const {
    if (rank == root) {
      auto e = all_reduced(tensor, reduction);
      e.outs.clear();
      return e;
    }
    Exchange e;
    e.outs.push_back({root, [=, values = flat(tensor)] { return reduction.sent(values); }});
    return e;
  }

  Exchange gathered_to(int root, const Tensor& input, const Tensors& outputs) const {
    if (rank == root) {
      auto e = gathered(flat(input), flat_all(outputs));
      e.outs.clear();
      return e;
    }
    Exchange e;
    e.outs.push_back({root, [values = flat(input)] { return bytes_of(values); }});
    return e;
  }

  Exchange scattered_by(int root, const Tensor& output, const Tensors& inputs) const {
    const auto into = flat(output);
    Exchange e;
    e.written = {into};
    if (rank == root) {
      const auto parts = flat_all(inputs);
      for (int peer : others()) e.outs.push_back({peer, [part = parts[peer]] { return bytes_of(part); }});
      e.finish = [into, mine = parts[rank]](Messages&) { write(into, bytes_of(mine)); };
    } else {
      e.ins = {root};
      e.finish = [=](Messages& got) { write(into, got.at(root)); };
    }
    return e;
  }

  Exchange exchanged(const Tensors& from, const Tensors& to) const {
    Exchange e;
    for (int peer : others()) e.outs.push_back({peer, [part = from[peer]] { return bytes_of(part); }});
    e.ins = others();
    e.written = to;
    e.finish = [=, *this](Messages& got) {
      got[rank] = bytes_of(from[rank]);
      for (auto& [peer, bytes] : got) write(to[peer], bytes);
    };
    return e;
  }
  Exchange gathered(const Tensor& input, const Tensors& outputs) const {
    return exchanged(Tensors(size, input), outputs);
  }
  Exchange gathered_into(const Tensor& output, const Tensor& input) const {
    TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(),
                     "output tensor must have the same type as input tensor");
    TORCH_CHECK_VALUE(input.numel() * size == output.numel(),
                      "output tensor size must be equal to world_size times input tensor size");
    return gathered(flat(input), equal_parts(output));
  }
  Tensors equal_parts(const Tensor& tensor) const {
    const auto values = flat(tensor);
    const int64_t each = values.numel() / size;
    Tensors parts;
    for (int k = 0; k < size; ++k) parts.push_back(values.slice(0, k * each, (k + 1) * each));
    return parts;
  }

  Exchange scattered(const Tensor& output, const Tensors& parts, const ReduceOp& op) const {
    const Reduction reduction(op, output.scalar_type(), size);
    const auto into = flat(output), own = parts[rank];
    Exchange e;
    for (int peer : others()) e.outs.push_back({peer, [=, part = parts[peer]] { return reduction.sent(part); }});
    e.ins = others();
    e.written = {into};
    e.finish = [=, *this](Messages& got) { write(into, bytes_of(reduced(got, reduction, own, rank))); };
    return e;
  }
  Exchange scattered_from(const Tensor& output, const Tensor& input, const ReduceOp& op) const {
    TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(),
                     "input tensor must be the same type as the output tensor.");
    TORCH_CHECK_VALUE(input.numel() == output.numel() * size,
                      "input tensor must be the same size as output size times world size");
    return scattered(output, equal_parts(input), op);
  }

  Tensors split_rows(const Tensor& tensor, const std::vector<int64_t>& rows) const {
    const auto values = flat(tensor);
    const int64_t first = tensor.dim() ? tensor.size(0) : 1, width = first ? tensor.numel() / first : 0;
    if (rows.empty()) {
      TORCH_CHECK(first % size == 0, "Tensor's dim 0 does not divide equally across group size");
      return equal_parts(tensor);
    }
    TORCH_CHECK(int(rows.size()) == size, "Number of tensor splits not equal to group size");
    Tensors parts;
    int64_t row = 0;
    for (int64_t count : rows) {
      parts.push_back(values.slice(0, row * width, (row + count) * width));
      row += count;
    }
    TORCH_CHECK(row == first, "Split sizes doesn't match total dim 0 size");
    return parts;
  }
};
}  // namespace fake_cuda::nccl
