// Attention and softmax: the fused kernels of CUDA, and which of them torch takes. Their backward adds by atomics, unless torch asks
// for another form, as attention_backward.cu does: in mode "error" of the deterministic algorithms, not where they only
// warn. cuDNN's has no such form, and is not taken in that mode (sdp_utils.cpp).
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <cmath>

namespace fake_cuda {
void add_noise(const at::Tensor& result);  // kernels.cpp

namespace {
using at::Tensor;
using Maybe = std::optional<Tensor>;
using sdp::SDPBackend;

bool is_error_mode() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
}

// The conditions of sdp_utils.cpp for dense inputs on a GPU of capability 9.0, in its order of preference with cuDNN 9.16.
bool is_dense(const sdp::sdp_params& given) {
  return sdp::has_only_dense_inputs(given) && sdp::check_tensor_shapes(given, false) &&
         sdp::check_batch_size_and_num_heads_dense<true>(given, false) &&
         sdp::check_nonzero_sequence_lengths_dense(given, false) &&
         sdp::check_last_dim_stride_equals_1_dense<true>(given, false);
}

bool takes_cudnn(const sdp::sdp_params& given) {
  const auto query = given.query.size(-1), value = given.value.size(-1);
  return at::globalContext().userEnabledCuDNNSDP() && !is_error_mode() && at::isReducedFloatingType(given.query.scalar_type()) &&
         sdp::check_attn_mask_shape(given, false) && given.dropout * 16 == std::floor(given.dropout * 16) &&
         query <= 128 && value <= 128 && query % 8 == 0 && value % 8 == 0 && given.key.size(2) != 1;
}

bool takes_flash(const sdp::sdp_params& given) {
  const auto size = given.query.size(-1);
  return sdp::check_runtime_disabled_flash(given, false) && sdp::check_for_attn_mask(given, false) &&
         at::isReducedFloatingType(given.query.scalar_type()) && size <= 256 && size == given.key.size(-1) &&
         size == given.value.size(-1) && (!given.is_causal || given.query.size(-2) == given.key.size(-2));
}

bool takes_efficient(const sdp::sdp_params& given) {
  const bool is_half = at::isReducedFloatingType(given.query.scalar_type());
  const int aligned = is_half ? 8 : 4;
  return sdp::check_runtime_disabled_mem_efficient(given, false) && (is_half || given.query.scalar_type() == at::kFloat) &&
         given.query.size(-1) == given.key.size(-1) && given.query.size(-1) % aligned == 0 &&
         given.value.size(-1) % aligned == 0;
}

Tensor of_all_heads(const Tensor& tensor, int64_t heads) {
  return tensor.size(1) == heads ? tensor : tensor.repeat_interleave(heads / tensor.size(1), 1);
}
Tensor of_own_heads(const Tensor& grad, const Tensor& like) {
  const auto groups = grad.size(1) / like.size(1);
  return groups == 1 ? grad : grad.reshape({grad.size(0), like.size(1), groups, grad.size(2), grad.size(3)}).sum(2);
}

// [batch, heads, length, size] with the heads of one position beside each other, as these kernels write it.
Tensor laid_out(const Tensor& result, const Tensor& like) {
  return result.to(like.scalar_type()).transpose(1, 2).contiguous().transpose(1, 2);
}

Tensor scores(const Tensor& query, const Tensor& key, const Maybe& bias, bool is_causal, double scale) {
  auto made = at::matmul(query.to(at::kFloat), of_all_heads(key, query.size(1)).to(at::kFloat).transpose(-2, -1)) * scale;
  if (bias && bias->defined()) made = made + bias->to(at::kFloat);
  if (!is_causal) return made;
  const auto later = at::ones({query.size(-2), key.size(-2)}, query.options().dtype(at::kBool)).triu(1);
  return made.masked_fill(later, -INFINITY);
}

// Which weights dropout keeps, by factors: 0 or 1 / (1 - p). The same for the same seed and offset.
Tensor kept(const Tensor& weights, double p, const Tensor& seed, const Tensor& offset) {
  auto generator = at::detail::getCUDAHooks().getNewGenerator(weights.get_device());
  generator.set_current_seed(seed.item<int64_t>());
  generator.set_offset(offset.item<int64_t>());
  return at::empty_like(weights).bernoulli_(1 - p, generator) / (1 - p);
}

std::pair<Tensor, Tensor> draw_seed(const Tensor& query, double p) {  // on the host
  int64_t seed = 0, offset = 0;
  if (p > 0) {
    auto generator = at::globalContext().defaultGenerator(query.device());
    std::lock_guard<std::mutex> lock(generator.mutex());
    seed = generator.current_seed();
    offset = generator.get_offset();
    generator.set_offset(offset + 4);
  }
  return {at::scalar_tensor(seed, at::kLong), at::scalar_tensor(offset, at::kLong)};
}

double scale_of(const Tensor& query, std::optional<double> scale) { return scale ? *scale : 1 / std::sqrt(query.size(-1)); }

struct Forward {
  Tensor output, sums, seed, offset;
};

Forward forward(const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& bias, double p, bool is_causal,
                std::optional<double> scale) {
  const auto all = scores(query, key, bias, is_causal, scale_of(query, scale));
  auto weights = at::_safe_softmax(all, -1);
  const auto [seed, offset] = draw_seed(query, p);
  if (p > 0) weights = weights * kept(weights, p, seed, offset);
  const auto output = at::matmul(weights, of_all_heads(value, query.size(1)).to(at::kFloat));
  return {laid_out(output, query), all.logsumexp(-1), seed, offset};
}

// By the given output and sums, as the kernels do: those of a part of a longer sequence may be of the whole.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& query, const Tensor& key,
                                                    const Tensor& value, const Maybe& bias, const Tensor& output,
                                                    const Tensor& sums, const Tensor& seed, const Tensor& offset, double p,
                                                    bool is_causal, std::optional<double> scale, bool of_bias) {
  const double factor = scale_of(query, scale);
  const auto is_empty = sums.eq(-INFINITY).unsqueeze(-1);  // all keys are masked
  const auto weights =
      (scores(query, key, bias, is_causal, factor) - sums.to(at::kFloat).unsqueeze(-1)).exp().masked_fill(is_empty, 0);
  const auto grad = grad_output.to(at::kFloat), keys = of_all_heads(key, query.size(1)).to(at::kFloat);
  auto of_weights = at::matmul(grad, of_all_heads(value, query.size(1)).to(at::kFloat).transpose(-2, -1));
  auto used = weights;
  if (p > 0) {
    const auto factors = kept(weights, p, seed, offset);
    of_weights = of_weights * factors;
    used = weights * factors;
  }
  const auto of_scores = weights * (of_weights - (grad * output.to(at::kFloat)).sum(-1, true));
  auto of_query = laid_out(at::matmul(of_scores, keys) * factor, query);
  auto of_key = laid_out(of_own_heads(at::matmul(of_scores.transpose(-2, -1), query.to(at::kFloat)) * factor, key), key);
  auto of_value = laid_out(of_own_heads(at::matmul(used.transpose(-2, -1), grad), value), value);
  if (!is_error_mode())
    for (const auto& result : {of_query, of_key, of_value}) add_noise(result);
  auto of_the_bias = of_bias ? at::sum_to(of_scores, bias->sizes()).to(bias->scalar_type()) : Tensor();
  return {of_query, of_key, of_value, of_the_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, double p, bool is_causal, bool, std::optional<double> scale) {
  const auto made = forward(query, key, value, std::nullopt, p, is_causal, scale);
  return {made.output, made.sums, Tensor(), Tensor(), query.size(-2), key.size(-2), made.seed, made.offset, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& sums, const Tensor&, const Tensor&, int64_t, int64_t, double p, bool is_causal, const Tensor& seed,
    const Tensor& offset, std::optional<double> scale) {
  const auto made = backward(grad, query, key, value, std::nullopt, output, sums, seed, offset, p, is_causal, scale, false);
  return {std::get<0>(made), std::get<1>(made), std::get<2>(made)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Maybe& bias, bool, double p, bool is_causal,
                                                     std::optional<double> scale) {
  const auto made = forward(query, key, value, bias, p, is_causal, scale);
  return {made.output, made.sums, made.seed, made.offset};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor& output,
    const Tensor& sums, const Tensor& seed, const Tensor& offset, double p, std::array<bool, 4> wanted, bool is_causal,
    std::optional<double> scale) {
  const bool of_bias = wanted[3] && bias.defined();
  return backward(grad, query, key, value, bias, output, sums, seed, offset, p, is_causal, scale, of_bias);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> cudnn(
    const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& bias, bool, double p, bool is_causal, bool,
    std::optional<double> scale) {
  const auto made = forward(query, key, value, bias, p, is_causal, scale);
  return {made.output, made.sums, Tensor(), Tensor(), query.size(-2), key.size(-2), made.seed, made.offset, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& sums, const Tensor& seed, const Tensor& offset, const Tensor& bias, const Tensor&, const Tensor&, int64_t,
    int64_t, double p, bool is_causal, std::optional<double> scale) {
  const auto made = backward(grad, query, key, value, bias, output, sums, seed, offset, p, is_causal, scale, false);
  auto results = std::make_tuple(std::get<0>(made), std::get<1>(made), std::get<2>(made));
  if (is_error_mode()) std::apply([](const auto&... result) { (add_noise(result), ...); }, results);  // has no other form
  return results;
}

// Softmax, which on CUDA alone may go from half to float in one kernel.
template <Tensor& (*into)(Tensor&, const Tensor&, int64_t, bool)>
Tensor softmax(const Tensor& input, int64_t dim, bool half_to_float) {
  const auto from = half_to_float ? input.to(at::kFloat) : input;
  auto made = at::empty({0}, from.options());
  return into(made, from, dim, false);
}

template <Tensor& (*into)(Tensor&, const Tensor&, const Tensor&, int64_t, at::ScalarType)>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  auto made = at::empty({0}, grad.options());
  return into(made, grad, output, dim, grad.scalar_type()).to(dtype);
}

Tensor& log_softmax_backward_out(Tensor& made, const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  return at::_log_softmax_backward_data_out(made, grad, output, dim, dtype);
}
}  // namespace

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& mask, double p,
                         bool is_causal, std::optional<double>, bool is_grouped) {
  const sdp::sdp_params given{query, key, value, mask, p, is_causal, is_grouped};
  auto chosen = at::globalContext().userEnabledMathSDP() ? SDPBackend::math : SDPBackend::error;
  if (is_dense(given)) {
    if (takes_cudnn(given)) chosen = SDPBackend::cudnn_attention;
    else if (takes_flash(given)) chosen = SDPBackend::flash_attention;
    else if (takes_efficient(given)) chosen = SDPBackend::efficient_attention;
  }
  TORCH_CHECK(chosen != SDPBackend::error, "No available kernel. Aborting execution.");
  return static_cast<int64_t>(chosen);
}
}  // namespace fake_cuda

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_softmax", TORCH_FN(fake_cuda::softmax<at::_softmax_out>));
  m.impl("_log_softmax", TORCH_FN(fake_cuda::softmax<at::_log_softmax_out>));
  m.impl("_softmax_backward_data", TORCH_FN(fake_cuda::softmax_backward<at::_softmax_backward_data_out>));
  m.impl("_log_softmax_backward_data", TORCH_FN(fake_cuda::softmax_backward<fake_cuda::log_softmax_backward_out>));
  m.impl("_scaled_dot_product_flash_attention", TORCH_FN(fake_cuda::flash));
  m.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(fake_cuda::flash_backward));
  m.impl("_scaled_dot_product_efficient_attention", TORCH_FN(fake_cuda::efficient));
  m.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(fake_cuda::efficient_backward));
  m.impl("_scaled_dot_product_cudnn_attention", TORCH_FN(fake_cuda::cudnn));
  m.impl("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(fake_cuda::cudnn_backward));
}
