// NCCL for the fake devices: collectives are kernels on streams, and their bytes travel between processes.
//
// A collective returns when it is queued. `Work.wait()` makes the current stream wait, not the host. A kernel whose
// peer has died never ends, until its communicator is aborted; then it ends without its result, and kernels behind it
// run.
#include "nccl_exchanges.h"
#include "nccl_work.h"

#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <set>
#include <sstream>

#include <unistd.h>

namespace fake_cuda { void bind_nccl(pybind11::module_&); }

namespace fake_cuda::nccl {
namespace {
constexpr const char* VERSION = "2.28.9";
constexpr size_t NEEDED = 4 << 20;  // bytes on the GPU for its buffers

int setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoi(value) : otherwise;
}

// DistributedDataParallel's statistics ask for one of the device; this one has the times of the host.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(at::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional(*to - *from) : std::nullopt;
  }
};

std::atomic<int64_t> num_groups{0};

[[noreturn]] void fail_as(const std::string& kind) {
  static const std::map<std::string, const char*> texts{
      {"memory", "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version %\nncclUnhandledCudaError: Call "
                 "to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 2097152 bytes: out of memory"},
      {"shm", "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version %\nncclSystemError: System call "
              "(e.g. socket, malloc) or external library call failed or device error.\nLast error:\nError while creating "
              "shared memory segment /dev/shm/nccl-XXXXXX (size 9637888), error: No space left on device (28)"},
      {"interface", "internal error - please report this issue to the NCCL developers, NCCL version %\nncclInternalError: "
                    "Internal check failed.\nLast error:\nBootstrap : no socket interface found"},
      {"usage", "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version %\nncclInvalidUsage: This usually "
                "reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on "
                "CUDA device 1000"},
      {"remote", "remote process exited or there was a network error, NCCL version %\nncclRemoteError: A call failed "
                 "possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: "
                 "Connection closed by remote peer"}};
  std::string text = texts.at(kind);
  text.replace(text.find('%'), 1, VERSION);
  C10_THROW_ERROR(DistBackendError, c10::str("NCCL error in: ProcessGroupNCCL.cpp:4000, ", text));
}

// FAKE_NCCL_FAULT="KIND RANK N": the N-th all-to-all or send of that rank fails as NCCL fails for want of memory, by a
// system call or because it is used wrongly; KIND is "memory", "shm", "interface", "usage" or "remote", the loss of a
// peer. With N = 0 it is the first communicator. A fourth word has the other ranks' N-th call block the host: as NCCL's
// does that connects to a peer. With KIND "abort" that rank's aborts do not return, nor those of any if RANK is -1; with
// N = 1 kernels under way do not end either.
struct Fault {
  std::string kind, others;
  int who = -1, call = 0;
  Fault() {
    const char* asked = std::getenv("FAKE_NCCL_FAULT");
    std::istringstream words(asked ? asked : "");
    words >> kind >> who >> call >> others;
  }
};

const Fault& fault() {
  static const Fault asked;
  return asked;
}

void fail_if_asked(int rank, bool connects = false) {
  static std::atomic<int> calls{0};
  if (fault().kind.empty() || fault().kind == "abort") return;
  if (connects ? fault().call != 0 : ++calls != fault().call) return;
  if (rank != fault().who && fault().others.empty()) return;
  while (rank != fault().who) pause();
  fail_as(fault().kind);
}

class NCCL final : public c10d::Backend {
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

 public:
  NCCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<NCCLOptions> options)
      : Backend(rank, size), options(std::move(options)), uid(num_groups++), store_(std::move(store)) {
    TORCH_CHECK_VALUE(num_devices() != 0, "ProcessGroupNCCL is only supported with GPUs, no GPUs found!");
    setGroupUid(this->options->group_name);
    const auto& ranks = this->options->global_ranks_in_group;
    global_rank_ = ranks.empty() ? rank : ranks[rank];
    group_->prefix = c10::str("[PG ID ", uid, " PG GUID ", this->options->group_name, " Rank ", rank, "] ");
    blocks_ = setting("TORCH_NCCL_BLOCKING_WAIT", 0);
    group_->error_handling = setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3);
    group_->dumps = setting("TORCH_NCCL_DUMP_ON_TIMEOUT", 1);
    group_->is_monitored = setting("TORCH_NCCL_ENABLE_MONITORING", 1);
    if (!blocks_) Watchdog::add(group_);
    init();
  }
  ~NCCL() override {
    group_->terminated = true;
    while (Clock::now() < group_->ends_at.load()) std::this_thread::sleep_for(milliseconds(50));  // it joins its monitor
  }

  const c10::intrusive_ptr<NCCLOptions> options;
  const int64_t uid;
  uint64_t num_splits = 0;

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(milliseconds timeout) override { options->timeout = timeout; }
  void add_timeout(milliseconds more) { ephemeral_ = more; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_collectives_; }
  c10d::ErrorType getError() override {
    std::lock_guard<std::mutex> lock(group_->mutex);
    return group_->error;
  }
  void eagerConnectSingleDevice(at::Device device) override {
    of_all(device.index());
    is_eager_ = true;
  }
  bool is_initialized() {
    std::lock_guard<std::mutex> lock(group_->mutex);
    return !group_->communicators.empty();
  }

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Backend::Options>& wanted) override {
    auto theirs = c10::dynamic_intrusive_pointer_cast<NCCLOptions>(wanted);
    TORCH_CHECK(theirs, "opts not a ProcessGroupNCCL::Options.");
    // Real ones meet over the parent's communicator: the store that is given may have another name on another rank.
    ++num_splits;
    const auto found = std::find(ranks.begin(), ranks.end(), rank_);
    if (found == ranks.end()) return nullptr;
    theirs->global_ranks_in_group.clear();
    for (int rank : ranks)
      theirs->global_ranks_in_group.push_back(
          options->global_ranks_in_group.empty() ? rank : options->global_ranks_in_group[rank]);
    auto made = c10::make_intrusive<NCCL>(store_->clone(), found - ranks.begin(), ranks.size(), theirs);
    made->place_ = c10::str(place_, "split/", num_splits, "/", c10::Join("-", ranks), "/");
    made->eagerConnectSingleDevice(at::Device(at::kCUDA, guess()));
    return made;
  }

  void abort() override {
    group_->terminated = true;
    const bool hangs = fault().kind == "abort" && (fault().who == -1 || fault().who == global_rank_);
    if (!hangs || fault().call == 0) group_->abort(c10::str("Process group was aborted on rank ", global_rank_, "."));
    while (hangs) pause();
  }

  void shutdown() override {
    if (group_->terminated.exchange(true)) return;
    std::vector<CommunicatorPtr> all;
    {
      std::lock_guard<std::mutex> lock(group_->mutex);
      for (auto& [_, communicator] : group_->communicators) all.push_back(communicator);
    }
    for (auto& communicator : all) wait_for(communicator->last);
    group_->abort(c10::str("Process group was destroyed on rank ", global_rank_, "."));
  }

  // Collectives.

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    const Tensor tensor = real(only(tensors));
    return launch(OpType::BROADCAST, {exchanges_.of_root(tensor, o.rootRank)}, {tensor}, {tensor}, o.asyncOp);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    TORCH_CHECK(tensors.size() == 1, MANY);
    return reduce_all(OpType::ALLREDUCE, tensors, o);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return reduce_all(OpType::COALESCED, tensors, o);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    const Tensor tensor = real(only(tensors));
    const Reduction reduction(o.reduceOp, tensor.scalar_type(), size_);
    return launch(OpType::REDUCE, {exchanges_.reduced_to(o.rootRank, tensor, reduction)}, {tensor}, {tensor},
                  o.asyncOp);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    const Tensor& input = only(inputs);
    TORCH_CHECK(outputs.size() == 1 && int(outputs[0].size()) == size_,
                "Tensor list input to scatter/gather must match number of collective participants");
    auto gathered = exchanges_.gathered(flat(input), flat_all(outputs[0]));
    return launch(OpType::ALLGATHER, {std::move(gathered)}, {input}, outputs[0], o.asyncOp);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& o) override {
    return launch(OpType::_ALLGATHER_BASE, {exchanges_.gathered_into(output, input)}, {input}, {output}, o.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    std::vector<Exchange> all;
    for (size_t k = 0; k < inputs.size(); ++k) all.push_back(exchanges_.gathered_into(outputs.at(k), inputs[k]));
    return launch(OpType::COALESCED, std::move(all), inputs, outputs, o.asyncOp);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, MANY);
    TORCH_CHECK(int(inputs[0].size()) == size_,
                "Tensor list input to scatter/gather must match number of participants");
    auto scattered = exchanges_.scattered(outputs[0], flat_all(inputs[0]), o.reduceOp);
    return launch(OpType::REDUCE_SCATTER, {std::move(scattered)}, inputs[0], outputs, o.asyncOp);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& o) override {
    auto scattered = exchanges_.scattered_from(output, input, o.reduceOp);
    return launch(OpType::_REDUCE_SCATTER_BASE, {std::move(scattered)}, {input}, {output}, o.asyncOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& o) override {
    std::vector<Exchange> all;
    for (size_t k = 0; k < inputs.size(); ++k)
      all.push_back(exchanges_.scattered_from(outputs.at(k), inputs[k], o.reduceOp));
    return launch(OpType::COALESCED, std::move(all), inputs, outputs, o.asyncOp);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) override {
    TORCH_CHECK(int(inputs.size()) == size_ && int(outputs.size()) == size_,
                "Tensor list must have one tensor for each rank");
    auto exchanged = exchanges_.exchanged(flat_all(inputs), flat_all(outputs));
    return launch(OpType::ALLTOALL, {std::move(exchanged)}, inputs, outputs, o.asyncOp);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& o) override {
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "Tensors must have identical type");
    fail_if_asked(global_rank_);
    auto from = exchanges_.split_rows(input, input_sizes), to = exchanges_.split_rows(output, output_sizes);
    return launch(OpType::ALLTOALL_BASE, {exchanges_.exchanged(from, to)}, {input}, {output}, o.asyncOp);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    const Tensor& input = only(inputs);
    TORCH_CHECK(rank_ == o.rootRank ? outputs.size() == 1 && int(outputs[0].size()) == size_ : outputs.empty(),
                "requires a list with ", size_, " output tensors on the root, and none elsewhere");
    const auto results = rank_ == o.rootRank ? outputs[0] : Tensors();
    return launch(OpType::GATHER, {exchanges_.gathered_to(o.rootRank, input, results)}, {input}, results, o.asyncOp);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    TORCH_CHECK(rank_ == o.rootRank ? inputs.size() == 1 && int(inputs[0].size()) == size_ : inputs.empty(),
                "requires a list with ", size_, " input tensors on the root, and none elsewhere");
    const auto given = rank_ == o.rootRank ? inputs[0] : Tensors();
    auto scattered = exchanges_.scattered_by(o.rootRank, only(outputs), given);
    return launch(OpType::SCATTER, {std::move(scattered)}, given, outputs, o.asyncOp);
  }

  WorkPtr send(Tensors& tensors, int peer, int) override {
    fail_if_asked(global_rank_);
    const auto values = flat(only(tensors));
    Exchange e;
    e.outs.push_back({peer, [=] { return bytes_of(values); }});
    return between(OpType::SEND, std::move(e), tensors[0], peer);
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override {
    const auto values = flat(only(tensors));
    Exchange e;
    e.ins = {peer};
    e.written = {values};
    e.finish = [=](Messages& got) { write(values, got.at(peer)); };
    return between(OpType::RECV, std::move(e), tensors[0], peer);
  }

  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    const int device = o.device ? o.device->index() : o.device_ids.empty() ? guess() : o.device_ids[0];
    Tensors tensors{at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(at::Device(at::kCUDA, device)))};
    c10d::AllreduceOptions reduction;
    reduction.asyncOp = o.asyncOp;
    auto work = reduce_all(OpType::BARRIER, tensors, reduction);
    if (!o.asyncOp) synchronize_stream(device, current_stream(device));
    return work;
  }

  void startCoalescing() override {
    is_grouping_ = true;
    ++num_collectives_;
  }
  WorkPtr endCoalescing() override {
    is_grouping_ = false;
    auto group = std::move(grouped_);
    grouped_ = {};
    if (!group.communicator) return nullptr;
    return enqueue_on(group.communicator, OpType::COALESCED, std::move(group.exchanges), group.tensors, {},
                      group.async);
  }

 private:
  static constexpr const char* MANY = "Expecting one tensor only but got multiple. You are probably using multiple "
                                      "devices under one thread. The support for such usage has been deprecated.";

  static const Tensor& only(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, MANY);
    return tensors[0];
  }
  static Tensor real(const Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }
  int guess() const {
    if (bound_device_id_) return bound_device_id_->index();
    if (!used_.empty()) return *used_.begin();
    return global_rank_ % num_devices();
  }

  static void look_at(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.is_cuda() && !tensor.is_sparse(), "Tensors must be CUDA and dense");
      TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "Tensors must be on the same GPU device, but found ",
                        tensors[0].device(), " and ", tensor.device());
      static const std::set<c10::ScalarType> known{
          at::kChar, at::kByte, at::kFloat, at::kDouble, at::kInt, at::kLong, at::kHalf, at::kBool, at::kBFloat16,
          at::kFloat8_e4m3fn, at::kFloat8_e5m2};
      TORCH_CHECK_TYPE(known.count(tensor.scalar_type()),
                       "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
    }
  }

  WorkPtr reduce_all(OpType type, const Tensors& tensors, const c10d::AllreduceOptions& o) {
    std::vector<Exchange> all;
    Tensors reals;
    for (const auto& tensor : tensors) {
      TORCH_CHECK(!tensor.is_complex() || c10d::isComplexViewAsRealAllowed(o.reduceOp),
                  "all_reduce does not support this reduction on complex tensors");
      reals.push_back(real(tensor));
      const Reduction reduction(o.reduceOp, reals.back().scalar_type(), size_);
      all.push_back(exchanges_.all_reduced(reals.back(), reduction));
    }
    return launch(type, std::move(all), reals, reals, o.asyncOp);
  }

  // Launching.

  CommunicatorPtr of_all(c10::DeviceIndex device) {
    if (bound_device_id_ && bound_device_id_->index() != device)
      C10_THROW_ERROR(DistBackendError,
                      "Attempt to perform collective on tensor not on device passed to init_process_group");
    used_.insert(device);
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) ranks.push_back(rank);
    return communicator("device " + std::to_string(device), device, ranks);
  }

  CommunicatorPtr communicator(const std::string& name, c10::DeviceIndex device, const std::vector<int>& ranks) {
    {
      std::lock_guard<std::mutex> lock(group_->mutex);
      if (auto found = group_->communicators.find(name); found != group_->communicators.end()) {
        found->second->check();
        return found->second;
      }
      if (!group_->reason.empty())
        C10_THROW_ERROR(DistBackendError,
                        c10::str("NCCL communicator was aborted on rank ", global_rank_, ". ", group_->reason));
    }
    fail_if_asked(global_rank_, true);
    if (free_memory(device) < NEEDED) fail_as("memory");
    auto made = std::make_shared<Communicator>();
    made->rank = rank_;
    made->device = device;
    // All ranks count the communicators of the group alike; one between two ranks is known by their numbers.
    const auto place = int(ranks.size()) == size_ && name[0] == 'd' ? std::to_string(num_communicators_++) : name;
    const auto key = [&](int rank) { return c10::str("fake-nccl/", place_, place, "/", rank); };
    store_->set(key(rank_), c10::str(Wire::get().address(), " ", physical_id(device), " ", Wire::random()));
    std::map<std::string, int> owners;
    for (int rank : ranks) {
      std::string said;
      try {
        said = store_->get_to_str(key(rank));
      } catch (const std::exception& error) {
        C10_THROW_ERROR(DistBackendError, c10::str("[", rank_, "] is setting up NCCL communicator and retrieving "
                        "ncclUniqueId from [", rank, "] via c10d key-value store by key '", key(rank),
                        "', but store->get('", key(rank), "') got error: ", error.what()));
      }
      std::istringstream words(said);
      std::string gpu;
      uint64_t number;
      words >> made->addresses[rank] >> gpu >> number;
      if (rank == ranks[0]) made->id = number;
      if (auto [other, fresh] = owners.emplace(gpu, rank); !fresh)
        C10_THROW_ERROR(DistBackendError, c10::str(
            "NCCL error in: ProcessGroupNCCL.cpp, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version ",
            VERSION, "\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Duplicate GPU detected : rank ", rank, " and rank ", other->second, " both on CUDA device ", gpu));
    }
    made->stream = new_stream(device, options->is_high_priority_stream ? -1 : 0);
    std::lock_guard<std::mutex> lock(group_->mutex);
    group_->communicators[name] = made;
    return made;
  }

  WorkPtr launch(OpType type, std::vector<Exchange> exchanges, const Tensors& inputs, const Tensors& outputs,
                 bool async) {
    auto all = inputs;
    all.insert(all.end(), outputs.begin(), outputs.end());
    if (all.empty()) return nullptr;
    look_at(all);
    const auto communicator = of_all(all[0].device().index());
    for (auto& exchange : exchanges) exchange.number = communicator->num_collectives++;
    if (is_grouping_) return grouped(communicator, std::move(exchanges), all, async);
    ++num_collectives_;
    return enqueue_on(communicator, type, std::move(exchanges), all, outputs, async);
  }

  WorkPtr between(OpType type, Exchange exchange, const Tensor& tensor, int peer) {
    look_at({tensor});
    const auto device = tensor.device().index();
    const int low = std::min(rank_, peer), high = std::max(rank_, peer);
    const auto communicator =
        is_grouping_ || is_eager_
            ? of_all(device)
            : this->communicator(c10::str(low, ":", high), device,
                                 low == high ? std::vector<int>{low} : std::vector<int>{low, high});
    exchange.kind = Kind::SEND;
    exchange.number = (type == OpType::SEND ? communicator->num_sent : communicator->num_received)[peer]++;
    std::vector<Exchange> exchanges{std::move(exchange)};
    if (is_grouping_) return grouped(communicator, std::move(exchanges), {tensor}, true);
    return enqueue_on(communicator, type, std::move(exchanges), {tensor}, {tensor}, true);
  }

  WorkPtr grouped(const CommunicatorPtr& communicator, std::vector<Exchange> exchanges, const Tensors& tensors,
                  bool async) {
    TORCH_CHECK(!grouped_.communicator || grouped_.communicator == communicator,
                "Tensors of coalesced operations must be on the same device");
    grouped_.communicator = communicator;
    grouped_.async = async;
    for (auto& exchange : exchanges) grouped_.exchanges.push_back(std::move(exchange));
    grouped_.tensors.insert(grouped_.tensors.end(), tensors.begin(), tensors.end());
    return nullptr;
  }

  // On a stream of the communicator if it is asynchronous; otherwise on the caller's, and no Work is returned.
  WorkPtr enqueue_on(const CommunicatorPtr& communicator, OpType type, std::vector<Exchange> exchanges,
                     const Tensors& tensors, const Tensors& outputs, bool async) {
    communicator->check();
    count_launch("nccl");
    const auto device = communicator->device;
    const auto stream = async ? communicator->stream : current_stream(device);
    auto queued = std::make_shared<Queued>();
    queued->communicator = communicator;
    queued->timeout = options->timeout + ephemeral_;
    ephemeral_ = milliseconds(0);
    int64_t numel = 0;
    for (const auto& tensor : tensors) numel += tensor.numel();
    queued->text = c10::str("WorkNCCL(SeqNum=", num_collectives_, ", OpType=", c10d::opTypeToString(type), ", Numel=",
                            numel, ", Timeout(ms)=", queued->timeout.count(), ")");
    if (async) queued->kept = tensors;
    auto kernel = std::make_shared<Kernel>(communicator, std::move(exchanges));
    std::vector<QueuedPtr> ended;  // released without the lock
    wait_for_room(device);  // before the lock, which the device may need to go on
    {
      std::lock_guard<std::mutex> lock(group_->mutex);
      if (async) enqueue_wait(device, stream, record(device, current_stream(device)));
      if (communicator->last) enqueue_wait(device, stream, communicator->last);
      enqueue(device, stream, [kernel] { return kernel->advance(); }, ("nccl " + c10d::opTypeToString(type)).c_str());
      queued->end = communicator->last = record(device, stream);
      if (!blocks_) group_->queued.push_back(queued);
      ended.swap(group_->ended);
    }
    for (auto& done : ended) done->release();
    if (!async) return nullptr;
    auto work = c10::make_intrusive<NCCLWork>(global_rank_, type, queued, group_, device, outputs, num_collectives_,
                                              blocks_, type == OpType::BARRIER);
    const at::Device place(at::kCUDA, device);
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, place, stream));
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                            std::vector<at::Device>{place});
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }

  struct Grouped {
    CommunicatorPtr communicator;
    std::vector<Exchange> exchanges;
    Tensors tensors;
    bool async = true;
  };

  const c10::intrusive_ptr<c10d::Store> store_;
  const Exchanges exchanges_{rank_, size_};
  const GroupPtr group_ = std::make_shared<Group>();
  int global_rank_ = 0;
  bool blocks_ = false, is_eager_ = false, is_grouping_ = false;
  Grouped grouped_;
  std::set<c10::DeviceIndex> used_;
  uint64_t num_collectives_ = 0;
  int num_communicators_ = 0;
  std::string place_;
  milliseconds ephemeral_{0};
};

void bind(pybind11::module_ m) {
  namespace py = pybind11;
  py::class_<NCCL, c10d::Backend, c10::intrusive_ptr<NCCL>> group(m, "ProcessGroupNCCL");
  py::class_<Config>(group, "NCCLConfig")
      .def(py::init<>())
      .def("__copy__", [](const Config& self) { return Config(self); })
      .def("__deepcopy__", [](const Config& self, const py::dict&) { return Config(self); })
      .def_readwrite("blocking", &Config::blocking)
      .def_readwrite("cga_cluster_size", &Config::cga_cluster_size)
      .def_readwrite("min_ctas", &Config::min_ctas)
      .def_readwrite("max_ctas", &Config::max_ctas)
      .def_readwrite("split_share", &Config::split_share)
      .def_readwrite("traffic_class", &Config::traffic_class)
      .def_readwrite("collnet_enable", &Config::collnet_enable)
      .def_readwrite("cta_policy", &Config::cta_policy)
      .def_readwrite("shrink_share", &Config::shrink_share)
      .def_readwrite("nvls_ctas", &Config::nvls_ctas)
      .def_readwrite("net_name", &Config::net_name)
      .def_readwrite("comm_name", &Config::comm_name);
  const auto copy = [](const NCCLOptions& self) { return c10::make_intrusive<NCCLOptions>(self); };
  py::class_<NCCLOptions, c10d::Backend::Options, c10::intrusive_ptr<NCCLOptions>>(group, "Options")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def("__copy__", copy)
      .def("__deepcopy__", [copy](const NCCLOptions& self, const py::dict&) { return copy(self); })
      .def_readwrite("is_high_priority_stream", &NCCLOptions::is_high_priority_stream)
      .def_readwrite("config", &NCCLOptions::config)
      .def_readwrite("split_from", &NCCLOptions::split_from)
      .def_readwrite("split_color", &NCCLOptions::split_color);
  using Seconds = std::chrono::milliseconds;
  group.def(py::init<c10::intrusive_ptr<c10d::Store>, int, int, c10::intrusive_ptr<NCCLOptions>>(), py::arg("store"),
           py::arg("rank"), py::arg("size"), py::arg("options"), py::call_guard<py::gil_scoped_release>())
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, int size, Seconds timeout) {
             auto options = c10::make_intrusive<NCCLOptions>();
             options->timeout = timeout;
             return c10::make_intrusive<NCCL>(std::move(store), rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout") = Seconds(DEFAULT_TIMEOUT),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", [](const NCCL& self) { return self.options; })
      .def_property_readonly("uid", [](const NCCL& self) { return self.uid; })
      .def_property("bound_device_id", &NCCL::getBoundDeviceId, &NCCL::setBoundDeviceId)
      .def("comm_split_count", [](const NCCL& self) { return self.num_splits; })
      .def("perform_nocolor_split", [](const NCCL&, const at::Device&) {})
      .def("register_mem_pool", [](const NCCL&, const py::args&, const py::kwargs&) {})
      .def("deregister_mem_pool", [](const NCCL&, const py::args&) {})
      .def("_group_start", [](const NCCL&) {})
      .def("_group_end", [](const NCCL&) {})
      .def("_is_initialized", &NCCL::is_initialized, py::call_guard<py::gil_scoped_release>())
      .def("_set_default_timeout", &NCCL::setTimeout)
      .def("_add_ephemeral_timeout", &NCCL::add_timeout)
      .def("get_error", [](NCCL& self) { return int(self.getError()); });
  group.attr("NCCL_CTA_POLICY_DEFAULT") = 0;
  group.attr("NCCL_CTA_POLICY_EFFICIENCY") = 1;
  group.attr("NCCL_CTA_POLICY_ZERO") = 2;
}
}  // namespace
}  // namespace fake_cuda::nccl

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, fake_cuda::nccl::Timer)
}

void fake_cuda::bind_nccl(pybind11::module_& m) {
  m.def("bind_nccl", &nccl::bind);  // later: the classes of torch.distributed are not there when torch.cuda is imported
}
