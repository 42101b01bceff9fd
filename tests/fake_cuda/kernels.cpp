// Operations: CPU kernels, run late on the device's thread. Where torch has no kernel for CUDA, which is nearly
// everywhere, it calls `fallback`: that asks the meta kernel for the form of the results, makes them, and enqueues.
#include "device.h"

#include <pybind11/pybind11.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/item.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_dropout.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

namespace fake_cuda {
c10::Allocator* device_memory();
bool is_pinned(const void* pointer);
int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                         bool, std::optional<double>, bool);  // attention.cpp
void add_noise(const at::Tensor& result);
bool by_reciprocal(c10::OperatorHandle& op, std::vector<c10::IValue>& given);  // rounding.cpp
std::function<void(const torch::jit::Stack&)> other_rounding(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

namespace {
using at::Tensor;
using c10::Device, c10::DeviceType, c10::IValue;

Tensor form(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

at::SparseTensorImpl* coo(const Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

// Gives a sparse tensor the shape of another, and indices and values of its own.
void become(const Tensor& tensor, const Tensor& like, const Tensor& indices, const Tensor& values) {
  coo(tensor)->raw_resize_(coo(like)->sparse_dim(), coo(like)->dense_dim(), like.sizes());
  coo(tensor)->set_indices_and_values_unsafe(indices, values);
  coo(tensor)->set_coalesced(coo(like)->coalesced());
}

Tensor sparse(c10::DispatchKey key, const Tensor& like, const Tensor& indices, const Tensor& values) {
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), like.dtype());
  become(made, like, indices, values);
  return made;
}

// A host tensor over the device's memory that keeps it: for what the host reads at once.
Tensor over(const Tensor& tensor) {
  if (tensor.is_sparse())
    return sparse(c10::DispatchKey::SparseCPU, tensor, over(coo(tensor)->indices_), over(coo(tensor)->values_));
  auto* keep = new c10::Storage(tensor.storage());
  c10::DataPtr pointer(const_cast<void*>(keep->data()), keep, [](void* c) { delete static_cast<c10::Storage*>(c); },
                       Device(DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), keep->nbytes(), std::move(pointer),
                       c10::GetAllocator(DeviceType::CPU), true);
  return form(std::move(storage), tensor, c10::DispatchKey::CPU);
}

Tensor as_meta(const Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(nullptr, Device(DeviceType::Meta)), c10::GetAllocator(DeviceType::Meta), true);
  return form(std::move(storage), tensor, c10::DispatchKey::Meta);
}

Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype, Device device) {
  c10::DeviceGuard guard(device);
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, dtype.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, device_memory()->allocate(bytes), device_memory(), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

Tensor home_copy(const Tensor& host, Device device) {  // a result that the host has computed
  if (!host.defined()) return host;
  auto made = make(host.sizes(), host.strides(), host.dtype(), device);
  const auto target = over(made);
  synchronize_stream(device.index(), current_stream(device.index()));
  target.copy_(host);
  return made;
}

// What an operation does, from its schema.
struct Kind {
  bool is_view = true;        // returns other forms of its arguments' memory, and computes nothing
  bool is_out = false;        // writes into out=, which may be resized
  bool makes = false;         // returns new tensors
  bool returns_values = false;  // that the host sees
  int generator = -1;  // which argument is one
  bool is_random = false;
  std::vector<int> returned;  // for each result the argument that it is; -1 for a new one
};

const Kind& kind_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<std::string, Kind> kinds;
  const auto& schema = op.schema();
  const auto name = toString(schema.operator_name());
  std::lock_guard<std::mutex> lock(mutex);
  auto found = kinds.find(name);
  if (found != kinds.end()) return found->second;
  Kind kind;
  const auto& arguments = schema.arguments();
  for (size_t k = 0; k < arguments.size(); ++k) {
    if (arguments[k].type()->str().find("Generator") != std::string::npos) kind.generator = k;
    kind.is_out = kind.is_out || (arguments[k].is_out() && arguments[k].kwarg_only());
  }
  for (const auto& result : schema.returns()) {
    const auto type = result.type();
    const bool is_tensor = type->isSubtypeOf(*c10::TensorType::get()) || type->str().find("Tensor") != std::string::npos;
    kind.returns_values = kind.returns_values || !is_tensor;
    const auto* alias = result.alias_info();
    int same = -1;
    if (alias && alias->isWrite())
      for (size_t k = 0; k < arguments.size(); ++k) {
        const auto* other = arguments[k].alias_info();
        if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) same = k;
      }
    kind.is_view = kind.is_view && alias && !alias->isWrite();
    kind.makes = kind.makes || (is_tensor && same < 0);
    kind.returned.push_back(same);
  }
  kind.is_view = kind.is_view && !schema.returns().empty();
  kind.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  return kinds.emplace(name, std::move(kind)).first->second;
}

// Meta kernels complain of an out= without elements that torch itself has made.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

c10::WarningHandler* silent() {
  static Silent handler;
  return &handler;
}

// Replaces the tensors of a value.
template <class F>
IValue mapped(const IValue& value, const F& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorList()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, const F& see) {
  mapped(value, [&](const Tensor& tensor) { if (tensor.defined()) see(tensor); return tensor; });
}

// Operations whose CUDA kernels take indices from the host.
const std::set<std::string> MAY_MIX = {"aten::index.Tensor",         "aten::index.Tensor_out",
                                       "aten::index_put_",          "aten::_index_put_impl_",
                                       "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put",
                                       "aten::index_put"};

const std::set<std::string> OWN_KERNELS = {"aten::convolution", "aten::convolution_backward", "aten::cumsum",
                                           "aten::cumsum_",     "aten::cumprod",              "aten::cumprod_"};

// Operations whose CPU kernels give results of other dtypes than CUDA's, which the meta kernels foresee.
const std::set<std::string> HAS_OWN_FORM = {"aten::native_batch_norm"};

uint64_t mixed(uint64_t seed, uint64_t offset) {  // splitmix64
  uint64_t z = seed * 0x9E3779B97F4A7C15ull + offset + 0x632BE59BD9B4E019ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// A host generator for one kernel; moves the device's on.
at::Generator draw(std::optional<at::Generator> generator, Device device, const std::string& name) {
  if (!generator || !generator->defined()) generator = at::globalContext().defaultGenerator(device);
  TORCH_CHECK(generator->device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              generator->device().type(), "' (", name, ")");
  std::lock_guard<std::mutex> lock(generator->mutex());
  const auto seed = mixed(generator->current_seed(), generator->get_offset());
  generator->set_offset(generator->get_offset() + 4);
  return at::detail::createCPUGenerator(seed);
}

// Results that alias arguments: the very argument, or another form of its memory.
Tensor home(const Tensor& result, const std::vector<std::pair<Tensor, Tensor>>& pairs, Device device) {
  if (!result.defined() || result.is_cuda()) return result;
  for (const auto& [ours, host] : pairs) {
    if (result.is_same(host)) return ours;
    if (result.has_storage() && host.has_storage() &&
        result.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl()) {
      auto made = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), result.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
      return made;
    }
  }
  if (result.is_sparse())
    return sparse(c10::DispatchKey::SparseCUDA, result, home(coo(result)->indices_, pairs, device),
                  home(coo(result)->values_, pairs, device));
  return home_copy(result, device);
}

// Runs an operation at once, on memory that the device has finished with: for views, and for what the host looks at.
void at_once(const c10::OperatorHandle& op, torch::jit::Stack* stack, Device device, const std::vector<IValue>& given,
             c10::DispatchKey key = c10::DispatchKey::CPU) {
  std::vector<std::pair<Tensor, Tensor>> pairs;
  std::vector<std::pair<Tensor, Tensor>> parts;  // of sparse arguments, and of their host forms
  const int generator = kind_of(op).generator;
  for (int k = 0; k < int(given.size()); ++k) {
    if (k == generator) { stack->emplace_back(draw(given[k].toOptional<at::Generator>(), device, op.schema().name())); continue; }
    if (given[k].isDevice()) { stack->emplace_back(Device(DeviceType::CPU)); continue; }
    stack->push_back(mapped(given[k], [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      auto host = over(tensor);
      pairs.emplace_back(tensor, host);
      if (tensor.is_sparse()) {
        parts.emplace_back(coo(tensor)->indices_, coo(host)->indices_);
        parts.emplace_back(coo(tensor)->values_, coo(host)->values_);
      }
      return host;
    }));
  }
  pairs.insert(pairs.end(), parts.begin(), parts.end());
  const bool is_dense = key == c10::DispatchKey::CPU;
  const auto finish = is_dense ? other_rounding(op, {stack->end() - given.size(), stack->end()}) : nullptr;
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  const size_t first = stack->size() - op.schema().returns().size();
  if (finish) finish({stack->begin() + first, stack->end()});
  for (size_t k = first; k < stack->size(); ++k)
    (*stack)[k] = mapped((*stack)[k], [&](const Tensor& result) { return home(result, pairs, device); });
  for (auto& [ours, host] : pairs)  // an argument that was written to, and has other entries; an out= that was resized
    if (ours.is_sparse())
      become(ours, host, home(coo(host)->indices_, pairs, device), home(coo(host)->values_, pairs, device));
    else if (ours.sizes() != host.sizes()) {
      auto moved = home_copy(host, device);
      ours.unsafeGetTensorImpl()->set_storage_keep_dtype(moved.storage());
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(moved.sizes(), moved.strides());
    }
}

// All that decides the form of the results, as text; empty if an argument has no text.
std::string key_of(const std::string& name, const std::vector<IValue>& given) {
  std::ostringstream key;
  key << name << std::hexfloat << c10::get_default_dtype_as_scalartype();
  for (const auto& value : given) {
    key << '|';
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      mapped(value, [&](const Tensor& tensor) {
        if (!tensor.defined()) { key << '-'; return tensor; }
        key << tensor.scalar_type() << (tensor.is_cuda() ? 'd' : 'h') << tensor.sizes() << tensor.strides();
        key << tensor.unsafeGetTensorImpl()->is_wrapped_number();
        return tensor;
      });
    } else if (value.isDouble()) {
      key << value.toDouble();
    } else if (value.isNone() || value.isInt() || value.isBool() || value.isIntList() || value.isString() ||
               value.isDoubleList() || value.isBoolList() || value.isScalar() || value.isDevice()) {
      key << value;
    } else if (!value.isGenerator()) {
      return "";
    }
  }
  return key.str();
}

// Whether the best plan for a convolution's gradient gets the memory it needs, FAKE_CUDA_WORKSPACE_MIB. Where it has
// once not, another is taken from then on, without a word, as in try_plans of torch's Conv_v8.cpp.
bool has_workspace(const std::string& key) {
  static std::mutex mutex;
  static auto* without = new std::set<std::string>();
  static const char* mib = std::getenv("FAKE_CUDA_WORKSPACE_MIB");
  std::lock_guard<std::mutex> lock(mutex);
  if (!mib || without->count(key)) return !mib;
  try {
    device_memory()->allocate(size_t(std::atol(mib)) << 20);
  } catch (const c10::OutOfMemoryError&) {
    without->insert(key);
  }
  return !without->count(key);
}

// The form of the results, by the meta kernel; false where there is none, since the form depends on the numbers.
bool foresee(const c10::OperatorHandle& op, const std::vector<IValue>& given, std::vector<IValue>& results,
             std::vector<std::pair<Tensor, Tensor>>& pairs) {
  // Half of the meta kernels are written in Python and take a millisecond: each form is asked for once.
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::vector<IValue>>();  // not freed at exit, with torch gone
  const auto key = key_of(toString(op.schema().operator_name()), given);
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = known->find(key);
    if (found != known->end()) { results = found->second; return true; }
  }
  const bool on_cpu = HAS_OWN_FORM.count(toString(op.schema().operator_name()));
  torch::jit::Stack stack;
  for (const auto& value : given) {
    if (value.isDevice()) { stack.emplace_back(Device(DeviceType::Meta)); continue; }
    if (value.isGenerator()) { stack.emplace_back(); continue; }
    stack.push_back(mapped(value, [&](const Tensor& tensor) {
      if (!tensor.defined() || (!tensor.is_cuda() && tensor.dim() == 0)) return tensor;
      pairs.emplace_back(tensor, on_cpu ? at::zeros(tensor.sizes(), tensor.options().device(DeviceType::CPU)) : as_meta(tensor));
      return pairs.back().second;
    }));
  }
  c10::impl::ExcludeDispatchKeyGuard plain(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(c10::DispatchKey::Python) |
      c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot));
  c10::WarningUtils::WarningHandlerGuard quiet(silent());
  try {
    op.redispatchBoxed(c10::DispatchKeySet(on_cpu ? c10::DispatchKey::CPU : c10::DispatchKey::Meta), &stack);
  } catch (const c10::NotImplementedError&) {
    return false;
  } catch (const pybind11::error_already_set&) {  // of a meta kernel in Python: the data decide
    return false;
  }
  results.assign(stack.end() - op.schema().returns().size(), stack.end());
  for (const auto& [ours, meta] : pairs)
    if (ours.sizes() != meta.sizes()) return true;  // an out= is resized
  std::lock_guard<std::mutex> lock(mutex);
  if (!key.empty()) known->emplace(key, results);
  return true;
}

// Copies a list of tensors one by one, as torch does where they are not all on one device.
bool copies_lists(const std::vector<IValue>& given) {
  const auto targets = given[0].toTensorVector(), sources = given[1].toTensorVector();
  const auto is_elsewhere = [&](const Tensor& tensor) { return tensor.device() != targets[0].device(); };
  if (std::none_of(targets.begin(), targets.end(), is_elsewhere) &&
      std::none_of(sources.begin(), sources.end(), is_elsewhere))
    return false;
  for (size_t k = 0; k < targets.size(); ++k) targets[k].copy_(sources[k], given[2].toBool());
  return true;
}

// The name by which CUDA's kernel alerts, for operations without a deterministic form: those that the documentation of
// torch.use_deterministic_algorithms lists, under the names in their sources; null for all others.
const char* nondeterministic(const std::string& name, const std::vector<IValue>& given) {
  static const std::unordered_map<std::string, const char*> always = {
      {"avg_pool3d_backward", "avg_pool3d_backward_cuda"},
      {"_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward_cuda"},
      {"_adaptive_avg_pool3d_backward", "adaptive_avg_pool3d_backward_cuda"},
      {"adaptive_max_pool2d_backward", "adaptive_max_pool2d_backward_cuda"},
      {"fractional_max_pool2d_backward", "fractional_max_pool2d_backward_cuda"},
      {"fractional_max_pool3d_backward", "fractional_max_pool3d_backward_out_cuda"},
      {"max_unpool2d", "max_unpooling2d_forward_out"},
      {"max_unpool3d", "max_unpooling3d_forward_out"},
      {"upsample_linear1d_backward", "upsample_linear1d_backward_out_cuda"},
      {"upsample_bilinear2d_backward", "upsample_bilinear2d_backward_out_cuda"},
      {"upsample_bicubic2d_backward", "upsample_bicubic2d_backward_out_cuda"},
      {"upsample_trilinear3d_backward", "upsample_trilinear3d_backward_out_cuda"},
      {"_upsample_bilinear2d_aa_backward", "upsample_bilinear2d_aa_backward_out_cuda"},
      {"_upsample_bicubic2d_aa_backward", "upsample_bicubic2d_aa_backward_out_cuda"},
      {"reflection_pad1d_backward", "reflection_pad1d_backward_out_cuda"},
      {"reflection_pad2d_backward", "reflection_pad2d_backward_cuda"},
      {"reflection_pad3d_backward", "reflection_pad3d_backward_out_cuda"},
      {"replication_pad1d_backward", "replication_pad1d_backward_cuda"},
      {"replication_pad2d_backward", "replication_pad2d_backward_cuda"},
      {"replication_pad3d_backward", "replication_pad3d_backward_cuda"},
      {"_ctc_loss_backward", "ctc_loss_backward_gpu"},
      {"kthvalue", "kthvalue CUDA"},
      {"grid_sampler_2d_backward", "grid_sampler_2d_backward_cuda"},
      {"grid_sampler_3d_backward", "grid_sampler_3d_backward_cuda"},
      {"index_reduce", "index_reduce_cuda"},
      {"index_reduce_", "index_reduce_cuda"}};
  const auto dot = name.find('.');
  const auto base = name.substr(6, dot == std::string::npos ? dot : dot - 6);  // without "aten::"
  const auto found = always.find(base);
  if (found != always.end()) return found->second;
  const auto is_real = [&](int k) { return given.at(k).isTensor() && !c10::isIntegralType(given.at(k).toTensor().scalar_type(), true); };
  if (base == "put_" && !given.at(3).toBool()) return "put_";
  if ((base == "cumsum" || base == "cumsum_") && (given.at(2).isNone() ? is_real(0) : !c10::isIntegralType(given.at(2).toScalarType(), true)))
    return "cumsum_cuda_kernel";
  if (base == "nll_loss2d_forward" && given.at(3).toInt() != 0) return "nll_loss2d_forward_out_cuda_template";
  if ((base == "median" || base == "nanmedian") && given.size() > 1) return "median CUDA with indices output";
  if (base == "histc" && is_real(0)) return "_histc_cuda with floating point input";
  if (base == "bincount" && given.at(1).isTensor() && given.at(1).toTensor().defined()) return "_bincount_cuda";
  if (base == "_embedding_bag_dense_backward" && given.at(7).toInt() == 2) return "embedding_bag_backward_cuda_max";
  if ((base == "scatter_reduce" || base == "scatter_reduce_") && given.at(4).toStringView() == "prod") return "scatter_reduce_cuda";
  if ((base == "scatter" || base == "scatter_") && name.find("reduce") != std::string::npos) return "scatter_reduce_cuda_kernel";
  return nullptr;
}

// Scans of one row, whose order of operations the times of blocks decide, and of which torch does not tell (scan_dim in
// ScanUtils.cuh: cub's inclusive_scan); `cumsum` alerts.
bool is_scan_by_look_back(const std::string& name, const std::vector<IValue>& given) {
  if (name.rfind("aten::cumprod", 0) != 0 && name.rfind("aten::_logcumsumexp", 0) != 0) return false;
  if (name.rfind("aten::cumprod_backward", 0) == 0) return false;
  const Tensor scanned = given[0].toTensor();
  return scanned.dim() > 0 && scanned.numel() == scanned.size(given[1].toInt()) && at::isFloatingType(scanned.scalar_type());
}

void fallback(const c10::OperatorHandle& called, torch::jit::Stack* stack) {
  std::vector<IValue> given(stack->end() - called.schema().arguments().size(), stack->end());
  stack->erase(stack->end() - given.size(), stack->end());
  auto op = called;
  by_reciprocal(op, given);
  const auto& schema = op.schema();
  const auto name = toString(schema.operator_name());
  const Kind& kind = kind_of(op);
  const size_t count = schema.arguments().size();

  if (name == "aten::_foreach_copy_" && copies_lists(given)) return;

  std::optional<Device> device;
  bool has_host = false;
  for (const auto& value : given) {
    each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) { has_host = has_host || tensor.dim() > 0; return; }
      TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at "
                  "least two devices, ", *device, " and ", tensor.device(), "! (", name, ")");
      device = tensor.device();
    });
    if (value.isDevice() && value.toDevice().is_cuda() && !device) device = value.toDevice();
  }
  if (!device || !device->has_index()) device = Device(DeviceType::CUDA, current_device());
  TORCH_CHECK(!has_host || MAY_MIX.count(name), "Expected all tensors to be on the same device, but found at least two "
              "devices, ", *device, " and cpu! (", name, ")");
  c10::DeviceGuard guard(*device);
  const auto on = device->index();
  const auto stream = current_stream(on);

  if (const char* known = nondeterministic(name, given)) at::globalContext().alertNotDeterministic(known);  // not late
  if (kind.is_view) return at_once(op, stack, *device, given);
  if (has_host) count_wait("indices from the host");

  std::vector<IValue> forms;
  std::vector<std::pair<Tensor, Tensor>> pairs;
  const bool asks_form = kind.makes || kind.is_out;
  if (kind.returns_values || (asks_form && !foresee(op, given, forms, pairs))) {
    count_wait(name.c_str() + 6);  // without "aten::"
    synchronize_stream(on, stream);
    at_once(op, stack, *device, given);
    if (is_scan_by_look_back(name, given)) add_noise(stack->back().toTensor());
    return;
  }
  for (auto& [ours, meta] : pairs)
    if (kind.is_out && ours.sizes() != meta.sizes()) {
      auto moved = make(meta.sizes(), meta.strides(), meta.dtype(), *device);
      ours.unsafeGetTensorImpl()->set_storage_keep_dtype(moved.storage());
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(moved.sizes(), moved.strides());
    }

  std::vector<IValue> results;
  std::vector<Tensor> targets;  // host forms of the new results, flat; undefined where there is none
  for (size_t k = 0; k < kind.returned.size(); ++k) {
    if (kind.returned[k] >= 0) { results.push_back(given[kind.returned[k]]); continue; }
    results.push_back(mapped(forms[k], [&](const Tensor& meta) {
      if (!meta.defined()) { targets.emplace_back(); return meta; }
      auto made = make(meta.sizes(), meta.strides(), meta.dtype(), *device);
      targets.push_back(borrowed(made));
      return made;
    }));
  }

  torch::jit::Stack arguments;
  std::optional<at::Generator> drawn;
  for (size_t k = 0; k < count; ++k) {
    const auto& value = given[k];
    if (int(k) == kind.generator) {
      drawn = draw(value.toOptional<at::Generator>(), *device, name);
      arguments.emplace_back(*drawn);
    } else if (value.isDevice()) {
      arguments.emplace_back(Device(DeviceType::CPU));
    } else {
      arguments.push_back(mapped(value, [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (tensor.is_cuda()) return borrowed(tensor);
        auto copy = tensor.clone();  // the host may write to its own the moment that this returns
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      }));
    }
  }
  TORCH_CHECK(!kind.is_random || drawn || name == "aten::_fused_dropout", name, " draws by itself, which is not played");

  count_launch(name.c_str());
  const auto returned = kind.returned;
  enqueue(on, stream, [op, arguments, targets, returned]() mutable {
    c10::WarningUtils::WarningHandlerGuard quiet(silent());  // kernels that run late have no caller to warn
    torch::jit::Stack own(arguments);
    const auto finish = other_rounding(op, own);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &own);
    if (finish) finish(own);
    size_t next = 0;
    for (size_t k = 0; k < returned.size(); ++k) {
      if (returned[k] >= 0) continue;
      mapped(own[own.size() - returned.size() + k], [&](const Tensor& result) {
        const Tensor& target = targets.at(next++);
        if (!target.defined() || !result.defined()) return result;
        if (result.numel() == 0) return result;  // a CPU kernel leaves some results out that CUDA's fill
        TORCH_CHECK(target.sizes() == result.sizes() && target.dtype() == result.dtype(), "the meta kernel of ",
                    toString(op.schema().operator_name()), " foresaw ", target.sizes(), ", it made ", result.sizes());
        target.copy_(result);
        return result;
      });
    }
    return true;
  }, name.c_str());
  // cuDNN's benchmark takes the fastest plan for a convolution's gradient, also among the deterministic ones.
  if (name == "aten::convolution_backward" && results[1].toTensor().defined() &&
      (!has_workspace(key_of(name, arguments)) || at::globalContext().benchmarkCuDNN()))
    add_noise(results[1].toTensor());
  if (is_scan_by_look_back(name, given)) add_noise(results[0].toTensor());
  for (auto& result : results) stack->push_back(std::move(result));
}

// Operations on sparse tensors (COO) that look at no entries.
const std::set<std::string> NEEDS_NO_ENTRY = {
    "aten::_sparse_coo_tensor_with_dims_and_tensors", "aten::_sparse_coo_tensor_with_dims", "aten::_indices",
    "aten::_values", "aten::indices", "aten::values", "aten::_nnz", "aten::_coalesced_", "aten::is_coalesced",
    "aten::sparse_dim", "aten::dense_dim", "aten::_dimI", "aten::_dimV", "aten::empty.memory_format"};

// All run at once: the form of most results depends on the entries.
void sparse_fallback(const c10::OperatorHandle& called, torch::jit::Stack* stack) {
  std::vector<IValue> given(stack->end() - called.schema().arguments().size(), stack->end());
  stack->erase(stack->end() - given.size(), stack->end());
  auto op = called;
  by_reciprocal(op, given);
  const auto name = toString(op.schema().operator_name());
  Device device(DeviceType::CUDA, current_device());
  for (const auto& value : given) {
    each_tensor(value, [&](const Tensor& tensor) { if (tensor.is_cuda()) device = tensor.device(); });
    if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) device = value.toDevice();
  }
  c10::DeviceGuard guard(device);
  if (!NEEDS_NO_ENTRY.count(name)) {
    count_wait(name.c_str() + 6);
    synchronize_stream(device.index(), current_stream(device.index()));
  }
  if (name == "aten::copy_" && given[1].toTensor().is_cuda())  // the target may share its memory
    given[1] = home(over(given[1].toTensor()).clone(), {}, device);
  at_once(op, stack, device, given, c10::DispatchKey::SparseCPU);
}

// What the fallback cannot do: make, view, copy, draw without a generator, read.

Device place(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(DeviceType::CUDA, current_device());
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return make(size, stride, c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)), place(device));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto type = c10::dtype_or_default(dtype);
  const auto like = at::detail::empty_meta(size, type, std::nullopt, Device(DeviceType::Meta), std::nullopt, format);
  return make(size, like.strides(), c10::scalarTypeToTypeMeta(type), place(device));
}


Tensor viewed(const Tensor& tensor, const Tensor& host, const Tensor& form) {
  return home(form, {{tensor, host}}, tensor.device());
}
Tensor as_strided(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  const auto host = over(tensor);
  return viewed(tensor, host, host.as_strided(size, stride, offset));
}
Tensor view(const Tensor& tensor, at::IntArrayRef size) {
  const auto host = over(tensor);
  return viewed(tensor, host, host.view(size));
}
Tensor reshape_alias(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  const auto host = over(tensor);
  return viewed(tensor, host, host.as_strided(size, stride));
}
Tensor unfold(const Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  const auto host = over(tensor);
  return viewed(tensor, host, host.unfold(dim, size, step));
}

// As CUDA's: between devices, on the source's stream, which waits for the target's and is waited for by it. The host
// waits for copies from and to memory that is not pinned, and unless `non_blocking`.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  TORCH_CHECK(at::infer_size(self.sizes(), source.sizes()) == self.sizes(), "The size of tensor a ", self.sizes(),
              " must match the size of tensor b ", source.sizes());
  count_launch("copy_");
  const bool from_device = source.is_cuda(), to_device = self.is_cuda();
  const auto device = from_device ? source.device() : self.device();
  const auto on = device.index();
  const auto stream = current_stream(on);
  if (from_device && to_device) {
    const auto there = self.device().index();
    const bool crosses = there != on;
    if (crosses) enqueue_wait(on, stream, record(there, current_stream(there)));
    enqueue(on, stream, [target = borrowed(self), from = borrowed(source)]() mutable { target.copy_(from); return true; }, "copy_");
    if (crosses) enqueue_wait(there, current_stream(there), record(on, stream));
    return self;
  }
  const Tensor& host = from_device ? self : source;
  const bool pinned = host.storage().nbytes() > 0 && is_pinned(host.storage().data());
  // Memory of the host is kept until the copy has run; what is not pinned goes through a buffer of the driver's.
  const Tensor kept = from_device || pinned ? host : host.clone();
  if (from_device)
    enqueue(on, stream, [kept, from = borrowed(source)]() mutable { kept.copy_(from); return true; }, "copy_");
  else
    enqueue(on, stream, [target = borrowed(self), kept]() mutable { target.copy_(kept); return true; }, "copy_");
  if (!non_blocking || (from_device && !pinned)) {
    count_wait(from_device ? "copy to the host" : "copy from the host");
    synchronize_stream(on, stream);
  }
  return self;
}

at::Scalar item(const Tensor& tensor) {
  count_wait("item");
  synchronize_stream(tensor.get_device(), current_stream(tensor.get_device()));
  return over(tensor).item();
}

bool equal(const Tensor& one, const Tensor& other) {
  TORCH_CHECK(one.device() == other.device(), "Expected all tensors to be on the same device (equal)");
  count_wait("equal");
  synchronize_stream(one.get_device(), current_stream(one.get_device()));
  return at::equal(over(one), over(other));
}

const Tensor& resize_(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto fresh = empty(size, tensor.scalar_type(), {}, tensor.device(), {}, format);
  if (tensor.storage().nbytes() < fresh.storage().nbytes())
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides());
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

Tensor& set_whole(Tensor& tensor, at::Storage storage) {
  const int64_t count = storage.nbytes() / tensor.itemsize();
  return set_storage(tensor, std::move(storage), 0, count, 1);
}

Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
  return set_storage(tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

void record_stream(Tensor& tensor, c10::Stream stream) { record_on_stream(tensor, stream.id()); }

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  auto kept = at::empty(input.sizes(), input.options().dtype(at::kBool));
  if (train.has_value() && !*train) return {input.clone(), kept.fill_(true)};
  kept.bernoulli_(1 - p);
  return {at::mul(at::mul(input, kept), p < 1 ? 1 / (1 - p) : 0.0), kept};
}

}  // namespace

// Changes the last bit of some numbers of a new result, others in each process and call: as additions in another order do.
void add_noise(const Tensor& result) {
  static std::atomic<uint64_t> calls{0};
  const auto on = result.get_device();
  enqueue(on, current_stream(on), [target = borrowed(result), seed = mixed(getpid(), ++calls)]() mutable {
    auto changed = target.contiguous();
    auto* bytes = static_cast<uint8_t*>(changed.mutable_data_ptr());
    const size_t width = changed.itemsize(), count = changed.numel();
    for (size_t k = 0; k < count; ++k) {
      const bool is_zero = std::all_of(bytes + k * width, bytes + (k + 1) * width, [](uint8_t byte) { return byte == 0; });
      if (!is_zero) bytes[k * width] ^= mixed(seed, k) & 1;
    }
    target.copy_(changed);
    return true;
  });
}

Tensor borrowed(const Tensor& tensor) {
  c10::DataPtr pointer(const_cast<void*>(tensor.storage().data()), Device(DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(pointer),
                       c10::GetAllocator(DeviceType::CPU), true);
  return form(std::move(storage), tensor, c10::DispatchKey::CPU);
}

void bind_kernels(pybind11::module_& m) {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static torch::Library sparse(torch::Library::IMPL, "aten", c10::DispatchKey::SparseCUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    // What has kernels of its own on CUDA, and would else be put together of others: lists of tensors, convolutions, scans.
    if (name.name.rfind("aten::_foreach_", 0) == 0 || (OWN_KERNELS.count(name.name) && name.overload_name.empty()))
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    const auto op = dispatcher.findOp(name);
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::SparseCPU))
      sparse.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&sparse_fallback>());
  }
}
}  // namespace fake_cuda

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using namespace fake_cuda;
  m.impl("empty.memory_format", TORCH_FN(fake_cuda::empty));
  m.impl("empty_strided", TORCH_FN(fake_cuda::empty_strided));
  m.impl("as_strided", TORCH_FN(fake_cuda::as_strided));
  m.impl("view", TORCH_FN(fake_cuda::view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_local_scalar_dense", TORCH_FN(fake_cuda::item));
  m.impl("equal", TORCH_FN(fake_cuda::equal));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(fake_cuda::native_dropout));
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake_cuda::fallback>()); }
