// The five operations of SyncBatchNorm, which torch has for GPUs alone: made of others of the same device.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

namespace fake_cuda {
namespace {
using at::Tensor;
using Optional = std::optional<Tensor>;

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

Tensor by_channel(const Tensor& values, const Tensor& like) {
  std::vector<int64_t> sizes(like.dim(), 1);
  sizes[1] = values.numel();
  return values.reshape(sizes);
}

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const auto dims = all_but_channels(input);
  const auto mean = input.mean(dims);
  return {mean, (input - by_channel(mean, input)).square().mean(dims).add(eps).rsqrt()};
}

std::tuple<Tensor, Tensor> gather_stats(const Tensor&, const Tensor& means, const Tensor& invstds,
                                        const Optional& running_mean, const Optional& running_var, double momentum,
                                        double eps, const Tensor& counts) {
  const auto count = counts.reshape({-1, 1}), total = counts.sum();
  const auto mean = (means * count).sum(0) / total;
  const auto squares = (invstds.pow(-2) - eps + (means - mean).square()) * count;
  const auto sum = squares.sum(0);
  if (running_mean && running_mean->defined()) running_mean->mul_(1 - momentum).add_(mean, momentum);
  if (running_var && running_var->defined()) running_var->mul_(1 - momentum).add_(sum / (total - 1), momentum);
  return {mean, (sum / total + eps).rsqrt()};
}

Tensor elemt(const Tensor& input, const Optional& weight, const Optional& bias, const Tensor& mean,
             const Tensor& invstd, double) {
  auto output = (input - by_channel(mean, input)) * by_channel(invstd, input);
  if (weight && weight->defined()) output = output * by_channel(*weight, input);
  if (bias && bias->defined()) output = output + by_channel(*bias, input);
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                           const Tensor& invstd, const Optional&, bool, bool, bool) {
  const auto dims = all_but_channels(input);
  const auto sum = grad.sum(dims), product = (grad * (input - by_channel(mean, input))).sum(dims);
  return {sum, product, product * invstd, sum.clone()};
}

Tensor backward_elemt(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                      const Optional& weight, const Tensor& sum, const Tensor& product, const Tensor& counts) {
  const auto total = counts.sum(), scale = invstd.square() * product / total;
  const auto centred = (input - by_channel(mean, input)) * by_channel(scale, input);
  auto result = (grad - by_channel(sum / total, input) - centred) * by_channel(invstd, input);
  return weight && weight->defined() ? result * by_channel(*weight, input) : result;
}
}  // namespace
}  // namespace fake_cuda

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("batch_norm_stats", TORCH_FN(fake_cuda::stats));
  m.impl("batch_norm_gather_stats_with_counts", TORCH_FN(fake_cuda::gather_stats));
  m.impl("batch_norm_elemt", TORCH_FN(fake_cuda::elemt));
  m.impl("batch_norm_backward_reduce", TORCH_FN(fake_cuda::backward_reduce));
  m.impl("batch_norm_backward_elemt", TORCH_FN(fake_cuda::backward_elemt));
}
