// How CUDA's kernels round where the CPU's do so otherwise. A division by a number of the host is a product; and unless
// FAKE_CUDA_ALIEN is 0, what is not fixed to the bit by IEEE 754 has another last bit than on the CPU. So a result that
// depends on where it was computed shows. What has one rounding for each number (sums of two, products, quotients of
// tensors, square roots), comparisons and copies are the CPU's, and so are sums of many.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>

namespace fake_cuda {
namespace {
using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

// Functions of one number or a few that are approximated, and sums with a rounding on the way, a mean's or a root's.
const std::set<std::string> APPROXIMATE = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "digamma", "erf", "erfc", "erfinv", "exp",
    "exp2", "expm1", "hypot", "i0", "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logaddexp2", "logit", "pow",
    "polygamma", "rsqrt", "sigmoid", "sin", "sinc", "sinh", "tan", "tanh", "xlogy", "special_entr", "special_erfcx",
    "special_i0e", "special_i1", "special_i1e", "special_log_ndtr", "special_ndtri", "special_xlog1py", "special_zeta",
    "celu", "elu", "gelu", "log_sigmoid_forward", "mish", "selu", "silu", "softplus",
    "elu_backward", "gelu_backward", "log_sigmoid_backward", "mish_backward", "silu_backward", "softplus_backward",
    "_log_softmax", "_log_softmax_backward_data", "_masked_softmax", "_softmax", "_softmax_backward_data", "logsumexp",
    "linalg_vector_norm", "mean", "norm", "renorm", "std", "std_mean", "var", "var_mean", "_weight_norm_interface",
    "_weight_norm_interface_backward", "native_batch_norm", "native_batch_norm_backward", "native_group_norm",
    "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward", "_native_batch_norm_legit",
    "_fused_rms_norm", "_fused_rms_norm_backward", "_cdist_forward", "_cdist_backward", "_pdist_forward",
    "binary_cross_entropy", "binary_cross_entropy_backward", "huber_loss", "mse_loss", "nll_loss_forward", "smooth_l1_loss",
    "_ctc_loss", "_ctc_loss_backward", "grid_sampler_2d", "grid_sampler_3d", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_trilinear3d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"};

// Products and sums in one go: the product is not rounded, or the terms have another order.
const std::set<std::string> CONTRACTED = {
    "addcdiv", "addcmul", "lerp", "addmm", "addmv", "addbmm", "addr", "baddbmm", "bmm", "dot", "mm", "vdot", "convolution",
    "convolution_backward", "_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd", "_addmm_activation"};

std::string base_of(const std::string& name) {  // "aten::_foreach_exp_" is "exp"
  auto base = name.substr(6);
  if (base.size() > 1 && base.back() == '_') base.pop_back();
  return base.rfind("_foreach_", 0) == 0 ? base.substr(9) : base;
}

// A host's number among the arguments, by name; NaN if there is none.
double number(const c10::OperatorHandle& op, const Stack& arguments, const char* argument) {
  const auto at = op.schema().argumentIndexWithName(argument);
  if (!at) return NAN;
  const auto& value = arguments[*at];
  if (value.isScalar() && !value.toScalar().isComplex()) return value.toScalar().toDouble();
  return NAN;
}

bool is_other(const std::string& base, const c10::OperatorHandle& op, const Stack& arguments) {
  static const std::set<double> EXACT = {0, 0.5, 1, 2, 3};  // PowKernel.cu multiplies, and takes roots
  if (base == "pow") return !EXACT.count(number(op, arguments, "exponent"));
  if (APPROXIMATE.count(base) || CONTRACTED.count(base)) return true;
  if (base != "add" && base != "sub" && base != "rsub") return false;
  int exponent;  // a product with a power of two is exact
  const double alpha = number(op, arguments, "alpha");
  return !std::isnan(alpha) && alpha != 0 && std::abs(std::frexp(alpha, &exponent)) != 0.5;
}

// By the value alone, whatever its place is: of a number that is short, which is taken as exact, and of 0, infinity, NaN
// and denormals nothing, of others the last bit. Results in 16 bits are rounded from 32 and seldom differ: one in eight.
template <class Word, int MANTISSA, int EXPONENT>
void turn(Word* words, int64_t count) {
  constexpr Word exponents = ((Word(1) << EXPONENT) - 1) << MANTISSA, low = (Word(1) << (MANTISSA + 1) / 2) - 1;
  for (int64_t k = 0; k < count; ++k) {
    const Word word = words[k], exponent = word & exponents;
    if (exponent == 0 || exponent == exponents || (word & low) == 0) continue;
    if (sizeof(Word) > 2 || (uint32_t(word) * 2654435761u >> 29) == 0) words[k] ^= 1;
  }
}

// Turns the last bits of what is not as it was before.
void turn(const Tensor& result, const Tensor& before) {
  if (!result.defined() || result.numel() == 0) return;
  const auto real = result.is_complex() ? at::view_as_real(result) : result;
  if (!at::isFloatingType(real.scalar_type()) || real.itemsize() < 2) return;
  auto changed = real.clone(at::MemoryFormat::Contiguous);
  const auto count = changed.numel();
  auto* data = changed.mutable_data_ptr();
  switch (real.scalar_type()) {
    case at::kDouble: turn<uint64_t, 52, 11>(static_cast<uint64_t*>(data), count); break;
    case at::kFloat: turn<uint32_t, 23, 8>(static_cast<uint32_t*>(data), count); break;
    case at::kHalf: turn<uint16_t, 10, 5>(static_cast<uint16_t*>(data), count); break;
    case at::kBFloat16: turn<uint16_t, 7, 8>(static_cast<uint16_t*>(data), count); break;
    default: return;
  }
  if (before.defined()) changed = at::where(real.eq(result.is_complex() ? at::view_as_real(before) : before), real, changed);
  real.copy_(changed);
}

// As CUDA's, whose greater zero is the positive one, and which hands on a NaN as it is.
Tensor extreme(const Tensor& result, const Tensor& one, const Tensor& other, bool is_largest) {
  const auto zero = is_largest ? one + other : -(-one - other);
  auto made = at::where(one.eq(0).logical_and(other.eq(0)), zero, result);
  return at::where(one.isnan(), one, at::where(other.isnan(), other, made)).to(result.scalar_type());
}

template <class F>
void each(const IValue& value, const F& see) {
  if (value.isTensor()) see(value.toTensor());
  if (value.isTensorList()) for (const Tensor& tensor : value.toTensorList()) see(tensor);
}
}  // namespace

// "If the second operand is a CPU scalar, compute a * reciprocal(b). Note that this may lose one bit of precision compared
// to computing the division" (BinaryDivTrueKernel.cu). Lists of tensors, `_foreach_div`, are divided.
bool by_reciprocal(c10::OperatorHandle& op, std::vector<IValue>& given) {
  const auto& name = op.operator_name();
  const bool in_place = name.name == "aten::div_";
  if ((!in_place && name.name != "aten::div") || given.size() < 2 || !given[0].isTensor() || !given[1].isTensor()) return false;
  const auto& overload = name.overload_name;
  const bool has_mode = overload == "Tensor_mode" || overload == "out_mode", has_out = overload == "out" || overload == "out_mode";
  if (has_mode && !given[2].isNone()) return false;
  const Tensor one = given[0].toTensor(), by = given[1].toTensor();
  if (!one.is_cuda() || by.is_cuda() || by.dim() != 0) return false;
  auto common = at::result_type(one, by);
  if (at::isIntegralType(common, true)) common = c10::get_default_dtype_as_scalartype();
  if (common == at::kComplexHalf) return false;
  const bool is_wide = common == at::kDouble || common == at::kComplexDouble;
  const auto working = at::isComplexType(common) ? (is_wide ? at::kComplexDouble : at::kComplexFloat) : is_wide ? at::kDouble : at::kFloat;
  auto inverse = at::ones({}, at::TensorOptions(working)) / by.to(working);
  if (one.scalar_type() == common) {  // in full precision, and without a word in the dtype of the result
    inverse = inverse.to(at::isComplexType(common) ? at::kComplexDouble : at::kDouble);
    inverse.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  std::vector<IValue> product = {one, inverse};
  if (has_out) product.push_back(given.back());
  given = product;
  op = c10::Dispatcher::singleton().findSchemaOrThrow(in_place ? "aten::mul_" : "aten::mul", has_out ? "out" : "Tensor");
  return true;
}

// Called before an operation runs; what then changes its results. Null for one whose bits are the CPU's.
std::function<void(const Stack&)> other_rounding(const c10::OperatorHandle& op, const Stack& arguments) {
  static const char* asked = std::getenv("FAKE_CUDA_ALIEN");
  static const bool is_on = !asked || std::strcmp(asked, "0") != 0;
  const auto& name = op.operator_name().name;
  if (!is_on || name.rfind("aten::", 0) != 0) return nullptr;
  if (name == "aten::maximum" || name == "aten::minimum") {
    const auto one = arguments[0].toTensor().clone(), other = arguments[1].toTensor().clone();  // one may be the result
    return [=, is_largest = name == "aten::maximum"](const Stack& results) {
      const auto result = results.back().toTensor();
      if (at::isFloatingType(result.scalar_type())) result.copy_(extreme(result, one, other, is_largest));
    };
  }
  if (!is_other(base_of(name), op, arguments)) return nullptr;
  std::vector<std::pair<Tensor, Tensor>> written;
  const auto& declared = op.schema().arguments();
  for (size_t k = 0; k < declared.size(); ++k)
    if (const auto* alias = declared[k].alias_info(); alias && alias->isWrite())
      each(arguments[k], [&](const Tensor& tensor) {
        if (tensor.defined() && (tensor.is_floating_point() || tensor.is_complex())) written.emplace_back(tensor, tensor.clone());
      });
  return [written, returned = op.schema().returns()](const Stack& results) {
    for (const auto& [now, before] : written) turn(now, before);
    for (size_t k = 0; k < returned.size(); ++k)
      if (const auto* alias = returned[k].alias_info(); !alias || !alias->isWrite())
        each(results[results.size() - returned.size() + k], [](const Tensor& tensor) { turn(tensor, {}); });
  };
}
}  // namespace fake_cuda
