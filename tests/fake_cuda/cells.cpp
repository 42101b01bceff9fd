// The cells of recurrent layers: one kernel each on CUDA, which the CPU and the meta device do not have.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace fake_cuda {
namespace {
using at::Tensor;
using Bias = std::optional<Tensor>;

Tensor plus(const Tensor& gates, const Bias& bias) { return bias && bias->defined() ? gates + *bias : gates; }
Tensor summed(const Tensor& gates, bool has_bias) { return has_bias ? gates.sum(0, false) : Tensor(); }

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                                        const Bias& input_bias, const Bias& hidden_bias) {
  const auto gates = (plus(input, input_bias) + plus(hidden, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), keep = gates[1].sigmoid(), fresh = gates[2].tanh(), out = gates[3].sigmoid();
  const auto next = keep * cell + in * fresh;
  return {out * next.tanh(), next, at::cat({in, keep, fresh, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(const Bias& grad_hidden, const Bias& grad_cell, const Tensor& cell,
                                                 const Tensor& next, const Tensor& kept, bool has_bias) {
  const auto gates = kept.chunk(4, 1);
  const auto &in = gates[0], &keep = gates[1], &fresh = gates[2], &out = gates[3];
  const auto bent = next.tanh();
  const auto hidden = grad_hidden && grad_hidden->defined() ? *grad_hidden : at::zeros_like(next);
  const auto whole = plus(hidden * out * (1 - bent * bent), grad_cell);
  const auto grad = at::cat({whole * fresh * (1 - in) * in, whole * cell * (1 - keep) * keep,
                             whole * in * (1 - fresh * fresh), hidden * bent * (1 - out) * out}, 1);
  return {grad, whole * keep, summed(grad, has_bias)};
}

std::tuple<Tensor, Tensor> gru(const Tensor& input, const Tensor& hidden, const Tensor& state, const Bias& input_bias,
                               const Bias& hidden_bias) {
  const auto from_input = plus(input, input_bias).chunk(3, 1), from_hidden = plus(hidden, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid(), keep = (from_input[1] + from_hidden[1]).sigmoid();
  const auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + keep * (state - fresh), at::cat({reset, keep, fresh, state, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad, const Tensor& kept, bool has_bias) {
  const auto parts = kept.chunk(5, 1);
  const auto &reset = parts[0], &keep = parts[1], &fresh = parts[2], &state = parts[3], &from_hidden = parts[4];
  const auto grad_fresh = grad * (1 - keep) * (1 - fresh * fresh);
  const auto grad_reset = grad_fresh * from_hidden * (1 - reset) * reset;
  const auto grad_keep = grad * (state - fresh) * (1 - keep) * keep;
  const auto to_input = at::cat({grad_reset, grad_keep, grad_fresh}, 1);
  const auto to_hidden = at::cat({grad_reset, grad_keep, grad_fresh * reset}, 1);
  return {to_input, to_hidden, grad * keep, summed(to_input, has_bias), summed(to_hidden, has_bias)};
}
}  // namespace
}  // namespace fake_cuda

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(fake_cuda::lstm));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(fake_cuda::lstm_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(fake_cuda::gru));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(fake_cuda::gru_backward));
}
