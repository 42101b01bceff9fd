// What torch asks of a device: guard, hooks, memory, generators; and the module that Python sees.
#include "device.h"

#include <torch/csrc/utils/pybind.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace fake_cuda {
void stop();                            // streams.cpp
void bind_kernels(pybind11::module_&);  // kernels.cpp
#ifdef WITH_NCCL
void bind_nccl(pybind11::module_&);  // nccl.cpp
#endif

namespace {
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream, c10::StreamId;
constexpr int MOST = 16;
constexpr size_t LARGE = size_t(1) << 30;

// The GPUs that CUDA_VISIBLE_DEVICES leaves of FAKE_CUDA_DEVICES; read once, as the driver does.
const std::vector<int>& visible() {
  static const std::vector<int> found = [] {
    std::vector<int> ids;
    const char* count = std::getenv("FAKE_CUDA_DEVICES");
    const int there = std::min(MOST, count ? std::atoi(count) : 0);
    const char* wanted = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!wanted) {
      for (int id = 0; id < there; ++id) ids.push_back(id);
      return ids;
    }
    std::stringstream words(wanted);
    std::string word;
    while (std::getline(words, word, ',')) {
      int id = -1;
      if (word.rfind("GPU-", 0) == 0) {  // by (a prefix of) its UUID
        for (int k = 0; k < there; ++k)
          if (("GPU-" + physical_id(-1 - k)).rfind(word, 0) == 0) id = k;
      } else if (!word.empty()) {
        char* end = nullptr;
        id = std::strtol(word.c_str(), &end, 10);
        if (*end) id = -1;
      }
      if (id < 0 || id >= there) break;  // the driver stops at the first that there is not
      ids.push_back(id);
    }
    return ids;
  }();
  return found;
}

thread_local DeviceIndex current = 0;
thread_local StreamId streams[MOST] = {0};

const c10::impl::PyInterpreter* tracer() { return c10::impl::GPUTrace::get_trace(); }

// Memory.

struct Block {
  void* pointer;
  size_t size;
  DeviceIndex device;
  StreamId stream;
  std::set<StreamId> used_by;  // other streams, by record_stream
};

struct Stats { size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, num_ooms = 0; };

// Gives freed memory out again at once, to the next tensor of that size on the stream that it came from, as CUDA's
// caching allocator does; and fills it with NaN when the stream is there, so that a late reader sees it. Not earlier:
// a reader on another stream is safe as long as nothing is queued on the first one that would write.
class Memory final : public c10::DeviceAllocator {
 public:
  bool initialized() override { return true; }

  c10::DataPtr allocate(size_t size) override {
    const Device device(DeviceType::CUDA, current);
    if (size == 0) return {nullptr, nullptr, &ignore, device};
    check();
    const size_t rounded = (size + 511) / 512 * 512;
    Block* block = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      settle();
      auto& free = free_[{current, streams[current], rounded}];
      if (!free.empty()) { block = free.back(); free.pop_back(); }
    }
    if (block)
      enqueue(current, block->stream, [block] { std::memset(block->pointer, 0xFF, block->size); return true; });
    else block = make(rounded);
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_[current];
    stats.allocated += rounded;
    stats.peak = std::max(stats.peak, stats.allocated);
    if (auto* trace = tracer()) (*trace)->trace_gpu_memory_allocation(DeviceType::CUDA, (uintptr_t)block->pointer);
    return {block->pointer, block, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    synchronize_device(current);
    std::memcpy(to, from, size);
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int device = 0; device < num_devices(); ++device) synchronize_device(device);
    std::lock_guard<std::mutex> lock(mutex_);
    settle();
    for (auto& [key, blocks] : free_) {
      for (Block* block : blocks) {
        stats_[block->device].reserved -= block->size;
        std::free(block->pointer);
        delete block;
      }
      blocks.clear();
    }
  }

  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    if (!pointer.get_context() || pointer.get_deleter() != &release) return;
    auto* block = static_cast<Block*>(pointer.get_context());
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream.id() != block->stream) block->used_by.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats all;
    const auto& stats = stats_[device];
    for (auto* bytes : {&all.allocated_bytes, &all.active_bytes, &all.requested_bytes}) {
      (*bytes)[0].current = stats.allocated;
      (*bytes)[0].peak = stats.peak;
    }
    all.reserved_bytes[0].current = stats.reserved;
    all.reserved_bytes[0].peak = stats.peak_reserved;
    return all;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_[device].peak = stats_[device].allocated;
    stats_[device].peak_reserved = stats_[device].reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {total_ - stats_[device].reserved, total_};
  }
  Stats stats(DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_[device];
  }
  void limit(DeviceIndex device, double fraction) { fractions_[device] = fraction; }
  size_t total() const { return total_; }

 private:
  static void ignore(void*) {}
  static void release(void* context);

  Block* make(size_t size) {
    const size_t limit = fractions_[current] * total_;
    if (stats(current).reserved + size > limit) emptyCache();
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = stats_[current];
    stats.num_ooms += stats.reserved + size > limit;
    const auto mib = [](size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
    TORCH_CHECK_WITH(
        OutOfMemoryError, stats.reserved + size <= limit, "CUDA out of memory. Tried to allocate ", mib(size), ". GPU ",
        (int)current, " has a total capacity of ", mib(total_), " of which ", mib(limit - stats.reserved), " is free.");
    void* pointer = nullptr;
    TORCH_CHECK(!posix_memalign(&pointer, 512, size), "the host has no memory left for a fake GPU");
    if (size < LARGE) std::memset(pointer, 0xFF, size);  // a larger one takes memory of the host where it is written to
    stats.reserved += size;
    stats.peak_reserved = std::max(stats.peak_reserved, stats.reserved);
    return new Block{pointer, size, current, streams[current], {}};
  }

  void free(Block* block) {
    if (is_forked()) return;  // a data worker drops what its parent had
    std::lock_guard<std::mutex> lock(mutex_);
    stats_[block->device].allocated -= block->size;
    if (auto* trace = tracer()) (*trace)->trace_gpu_memory_deallocation(DeviceType::CUDA, (uintptr_t)block->pointer);
    std::vector<MarkPtr> marks;
    for (StreamId stream : block->used_by) marks.push_back(record(block->device, stream));
    block->used_by.clear();
    if (marks.empty()) give_back(block);
    else waiting_.emplace_back(block, std::move(marks));
  }

  void settle() {  // gives back what other streams have ended to use
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      bool passed = true;
      for (const auto& mark : it->second) passed = passed && has_passed(mark);
      if (!passed) { ++it; continue; }
      give_back(it->first);
      it = waiting_.erase(it);
    }
  }

  void give_back(Block* block) {
    free_[{block->device, block->stream, block->size}].push_back(block);
  }

  std::mutex mutex_;
  std::map<std::tuple<DeviceIndex, StreamId, size_t>, std::vector<Block*>> free_;
  std::vector<std::pair<Block*, std::vector<MarkPtr>>> waiting_;
  Stats stats_[MOST];
  double fractions_[MOST] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const size_t total_ = [] {
    const char* mib = std::getenv("FAKE_CUDA_MEMORY_MIB");
    return size_t(mib ? std::atol(mib) : 80 << 10) << 20;
  }();
};

Memory& memory() {
  static Memory* made = new Memory();  // never freed: tensors outlive static objects
  return *made;
}
}  // namespace
size_t free_memory(DeviceIndex device) { return memory().getMemoryInfo(device).first; }
namespace {
void Memory::release(void* context) { memory().free(static_cast<Block*>(context)); }

// Page-locked memory of the host: from it and to it copies run late. Rounded up to powers of two and never given back, as
// CUDA's; FAKE_CUDA_PINNED_MIB is how much there is.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, Device(DeviceType::CPU)};
    size = std::bit_ceil(size);
    std::lock_guard<std::mutex> lock(mutex_);
    auto& cached = cached_[size];
    if (cached.empty()) {
      static const char* limit = std::getenv("FAKE_CUDA_PINNED_MIB");
      TORCH_CHECK(!limit || locked_ + size <= size_t(std::atoi(limit)) << 20, "CUDA error: out of memory");
      cached.push_back(nullptr);
      TORCH_CHECK(!posix_memalign(&cached.back(), 512, size), "no memory to pin");
      locked_ += size;
    }
    void* pointer = cached.back();
    cached.pop_back();
    ranges_[(uintptr_t)pointer] = size;
    return {pointer, pointer, &release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto behind = ranges_.upper_bound((uintptr_t)pointer);
    if (behind == ranges_.begin()) return false;
    --behind;
    return (uintptr_t)pointer < behind->first + behind->second;
  }

 private:
  static void release(void* pointer);
  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
  std::map<size_t, std::vector<void*>> cached_;  // by size
  size_t locked_ = 0;
};

Pinned& pinned() {
  static Pinned* made = new Pinned();
  return *made;
}
void Pinned::release(void* pointer) {
  std::lock_guard<std::mutex> lock(pinned().mutex_);
  auto& ranges = pinned().ranges_;
  pinned().cached_[ranges.at((uintptr_t)pointer)].push_back(pointer);
  ranges.erase((uintptr_t)pointer);
}

// Random numbers.

// Counts like Philox: a seed, and an offset that each kernel moves on. A kernel's numbers are a function of both.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device, uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(Device(DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), seed_(seed) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.numel() == 16, "RNG state is wrong size");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index(), seed_);
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_, offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator>* made = [] {
    auto* all = new std::vector<at::Generator>();
    for (int k = 0; k < MOST; ++k) all->push_back(at::make_generator<Generator>(k));
    return all;
  }();
  return (*made)[device < 0 ? current : device];
}

// Events and streams, by the interface that all of torch's classes of them use.

struct Event {
  MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    const Device old(DeviceType::CUDA, current);
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices(), "CUDA error: invalid device ordinal");
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.index() >= 0) current = device.index(); }
  Stream getStream(Device device) const override { return of(device, streams[index(device)]); }
  Stream getDefaultStream(Device device) const override { return of(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool high = false) const override { return getNewStream(device, -high); }
  Stream getNewStream(Device device, int priority = 0) const override {
    const auto id = new_stream(index(device), priority);
    if (auto* trace = tracer()) (*trace)->trace_gpu_stream_creation(DeviceType::CUDA, id);
    return of(device, id);
  }
  Stream exchangeStream(Stream stream) const override {
    auto& at = streams[stream.device_index()];
    const Stream old = of(stream.device(), at);
    at = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return (void*)stream.id(); }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) {
      *event = new Event();
      if (auto* trace = tracer()) (*trace)->trace_gpu_event_creation(DeviceType::CUDA, (uintptr_t)*event);
    }
    static_cast<Event*>(*event)->mark = fake_cuda::record(stream.device_index(), stream.id());
    if (auto* trace = tracer()) (*trace)->trace_gpu_event_record(DeviceType::CUDA, (uintptr_t)*event, stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    enqueue_wait(stream.device_index(), stream.id(), static_cast<Event*>(event)->mark);
    if (auto* trace = tracer()) (*trace)->trace_gpu_event_wait(DeviceType::CUDA, (uintptr_t)event, stream.id());
  }
  bool queryEvent(void* event) const override { return !event || has_passed(static_cast<Event*>(event)->mark); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    if (!queryEvent(event)) count_wait("event.synchronize");
    wait_for(static_cast<Event*>(event)->mark);
    if (auto* trace = tracer()) (*trace)->trace_gpu_event_synchronization(DeviceType::CUDA, (uintptr_t)event);
  }
  bool queryStream(const Stream& stream) const override {
    return has_passed(fake_cuda::record(stream.device_index(), stream.id()));
  }
  void synchronizeStream(const Stream& stream) const override {
    count_wait("stream.synchronize");
    synchronize_stream(stream.device_index(), stream.id());
    if (auto* trace = tracer()) (*trace)->trace_gpu_stream_synchronization(DeviceType::CUDA, stream.id());
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    count_wait("synchronize");
    synchronize_device(device < 0 ? current : device);
    if (auto* trace = tracer()) (*trace)->trace_gpu_device_synchronization(DeviceType::CUDA);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    memory().recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return passed_at(static_cast<Event*>(second)->mark) - passed_at(static_cast<Event*>(first)->mark);
  }

 private:
  static DeviceIndex index(Device device) { return device.index() < 0 ? current : device.index(); }
  static Stream of(Device device, StreamId id) {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index(device)), id);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasCUDA() const override { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(DeviceType::CUDA, device)); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto old = current;
    setCurrentDevice(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  int getNumGPUs() const override { return num_devices(); }
  bool isPinnedPtr(const void* pointer) const override { return pinned().holds(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current : device);
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current); }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

std::atomic<int64_t> num_waits{0}, num_launches{0};
std::atomic<bool> listens{false};
std::atomic<int> sync_debug{0};
PyObject* listener = nullptr;
}  // namespace

int num_devices() { return visible().size(); }
DeviceIndex current_device() { return current; }
StreamId current_stream(DeviceIndex device) { return streams[device]; }

std::string physical_id(DeviceIndex device) {  // below 0: of the physical GPU -1 - device
  const int id = device < 0 ? -1 - device : visible().at(device);
  char text[64];
  std::snprintf(text, sizeof text, "%08x-0000-4000-8000-%012x", 0xfa4ec0da, id);
  return text;
}

void record_on_stream(const at::Tensor& tensor, StreamId stream) {
  memory().recordStream(tensor.storage().data_ptr(), Stream(Stream::UNSAFE, tensor.device(), stream));
}

void count_wait(const char* kind) {
  ++num_waits;
  if (std::strchr(kind, '.') == nullptr && std::strcmp(kind, "synchronize") != 0) {  // one that the script did not ask for
    TORCH_CHECK(sync_debug < 2, "called a synchronizing CUDA operation (", kind, ")");
    if (sync_debug == 1) TORCH_WARN("called a synchronizing CUDA operation (", kind, ")");
  }
  if (!listens) return;
  pybind11::gil_scoped_acquire gil;
  if (listener) pybind11::reinterpret_borrow<pybind11::object>(listener)(kind);
}

void count_launch(const char*) { ++num_launches; }

c10::Allocator* device_memory() { return &memory(); }
bool is_pinned(const void* pointer) { return pinned().holds(pointer); }
}  // namespace fake_cuda

C10_REGISTER_GUARD_IMPL(CUDA, fake_cuda::Guard);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake_cuda;
  namespace py = pybind11;
  // torch made its object for "no CUDA" when it was imported, and keeps it: it gets the functions of ours.
  static Hooks* mine = new Hooks(at::CUDAHooksArgs{});
  auto& live = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&live), static_cast<void*>(mine), sizeof(void*));
  c10::SetAllocator(DeviceType::CUDA, &memory(), 1);

  m.def("stop", &stop);
  m.def("num_devices", &num_devices);
  m.def("current_device", [] { return (int)current; });
  m.def("set_device", [](int device) { Guard().setDevice(Device(DeviceType::CUDA, device)); });
  m.def("current_stream", [](int device) { return (int64_t)streams[device < 0 ? current : device]; });
  m.def("set_stream", [](int64_t id, int device) { current = device; streams[device] = id; });
  m.def("synchronize", [] { Guard().synchronizeDevice(current); });
  m.def("physical_id", [](int device) { return physical_id(device); });
  m.def("generator", [](int device) { return default_generator(device); });
  m.def("total_memory", [] { return memory().total(); });
  m.def("empty_cache", [] { memory().emptyCache(); });
  m.def("limit_memory", [](double fraction, int device) { memory().limit(device, fraction); });
  m.def("reset_peak", [](int device) { memory().resetPeakStats(device); });
  m.def("memory", [](int device) {
    const auto stats = memory().stats(device);
    return std::make_tuple(stats.allocated, stats.peak, stats.reserved, stats.peak_reserved, stats.num_ooms);
  });
  m.def("resize_storage", [](const at::Tensor& tensor, size_t size) {
    c10::DeviceGuard guard(tensor.device());
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto fresh = memory().allocate(size);
    const size_t kept = std::min(size, storage->nbytes());
    if (kept) {
      void* to = fresh.get();
      const void* from = storage->data();
      enqueue(tensor.device().index(), streams[tensor.device().index()], [=] { std::memcpy(to, from, kept); return true; });
    }
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(size);
  });
  m.def("counts", [] { return std::make_pair(num_waits.load(), num_launches.load()); });
  m.def("held_up", &num_held_up);
  m.def("trace", &trace, py::arg("begins"));
  m.def("listen", [](py::object function) {
    listens = !function.is_none();
    Py_XDECREF(listener);
    listener = function.is_none() ? nullptr : function.release().ptr();
  });
  m.def("set_sync_debug", [](int mode) { sync_debug = mode; });
  m.def("sync_debug", [] { return sync_debug.load(); });
  bind_kernels(m);
#ifdef WITH_NCCL
  bind_nccl(m);
#endif
}
