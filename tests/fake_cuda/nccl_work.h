// What the host knows of queued collectives: when they end, for how long they may run, and what keeps their memory.
#pragma once
#include "nccl_kernel.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <climits>
#include <cstdlib>
#include <iostream>

namespace fake_cuda::nccl {
using c10d::OpType;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int DUMP_MS = 2'000, MONITOR_MS = 60'000;  // four times 15 s, and 480 s
constexpr auto DEFAULT_TIMEOUT = milliseconds(10 * 60 * 1000);

struct Config {  // ncclConfig_t: has no effect here
  int blocking = INT_MIN, cga_cluster_size = INT_MIN, min_ctas = INT_MIN, max_ctas = INT_MIN, split_share = INT_MIN;
  int traffic_class = INT_MIN, collnet_enable = INT_MIN, cta_policy = INT_MIN, shrink_share = INT_MIN;
  int nvls_ctas = INT_MIN;
  std::string net_name, comm_name;
};

struct NCCLOptions final : c10d::Backend::Options {
  explicit NCCLOptions(bool high = false)
      : c10d::Backend::Options("nccl", DEFAULT_TIMEOUT), is_high_priority_stream(high) {}
  bool is_high_priority_stream;
  Config config;
  c10::intrusive_ptr<c10d::Backend> split_from;
  int64_t split_color = -2;
};

// What has been queued, for the watchdog too.
struct Queued {
  MarkPtr end;
  CommunicatorPtr communicator;
  Clock::time_point since = Clock::now();
  milliseconds timeout;
  std::string text;
  std::mutex mutex;
  Tensors kept;  // from the allocator, until a stream of the caller waits for the end
  std::exception_ptr error;

  void release() {
    std::lock_guard<std::mutex> lock(mutex);
    kept.clear();
  }
  std::exception_ptr get_error() {
    std::lock_guard<std::mutex> lock(mutex);
    return error;
  }
  // Whether it takes too long; it has an error then.
  bool is_late(milliseconds allowed, const std::string& prefix) {
    const auto ran = std::chrono::duration_cast<milliseconds>(Clock::now() - since);
    if (ran < allowed || has_passed(end)) return false;
    std::lock_guard<std::mutex> lock(mutex);
    if (error) return true;
    const auto message = c10::str(prefix, "Watchdog caught collective operation timeout: ", text, " ran for ",
                                  ran.count(), " milliseconds before timing out.");
    std::cerr << message << std::endl;
    error = std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message));
    return true;
  }
};
using QueuedPtr = std::shared_ptr<Queued>;

struct Group {
  std::string prefix;
  int error_handling = 3;  // 0: none, 1: abort and end the process, 2: abort, 3: end the process
  std::mutex mutex;
  std::map<std::string, CommunicatorPtr> communicators;
  std::list<QueuedPtr> queued;
  std::vector<QueuedPtr> ended;  // by the watchdog; their tensors are released by a thread of the caller
  std::atomic<bool> terminated{false};
  bool dumps = true, is_monitored = true;
  std::atomic<Clock::time_point> ends_at{Clock::time_point::min()};  // of the process, by the monitor, unless aborted
  c10d::ErrorType error = c10d::ErrorType::SUCCESS;
  std::string reason;

  void abort(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex);
    if (reason.empty()) reason = why;
    for (auto& [_, communicator] : communicators) {
      if (communicator->aborted) continue;
      communicator->reason = why;
      communicator->aborted = true;
    }
  }
};
using GroupPtr = std::shared_ptr<Group>;

// The watchdogs of all groups, in one thread that never ends.
class Watchdog {
 public:
  static void add(const GroupPtr& group) {
    static Watchdog* watchdog = new Watchdog;
    std::lock_guard<std::mutex> lock(watchdog->mutex_);
    watchdog->groups_.push_back(group);
  }

 private:
  Watchdog() { std::thread([this] { watch(); }).detach(); }

  void watch() {
    for (;; std::this_thread::sleep_for(milliseconds(100))) {
      std::vector<GroupPtr> groups;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        groups_.remove_if([](const GroupPtr& group) { return group->terminated.load(); });
        groups.assign(groups_.begin(), groups_.end());
      }
      for (auto& group : groups) look_at(*group);
    }
  }

  static void look_at(Group& group) {
    const auto end = group.ends_at.load();
    if (end != Clock::time_point::min() && Clock::now() > end) {
      std::cerr << group.prefix << "Terminating the process after the monitor's dump." << std::endl;
      std::abort();
    }
    std::unique_lock<std::mutex> lock(group.mutex);
    for (auto it = group.queued.begin(); it != group.queued.end();) {
      const QueuedPtr queued = *it;
      const bool late = queued->is_late(queued->timeout, group.prefix);
      if (!late && !has_passed(queued->end)) { ++it; continue; }
      group.ended.push_back(queued);
      it = group.queued.erase(it);
      if (!late) continue;
      group.error = c10d::ErrorType::TIMEOUT;
      if (group.dumps) {  // the monitor wakes up, and the watchdog leaves it time for its dump, with the lock
        if (group.is_monitored) group.ends_at = Clock::now() + milliseconds(MONITOR_MS);
        std::this_thread::sleep_for(milliseconds(DUMP_MS));
      }
      lock.unlock();
      if (group.error_handling == 1 || group.error_handling == 2) group.abort("Watchdog aborted it after a timeout.");
      std::cerr << group.prefix
                << "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, "
                   "subsequent GPU operations might run on corrupted/incomplete data."
                << std::endl;
      if (group.error_handling == 1 || group.error_handling == 3) {
        std::cerr << group.prefix
                  << "To avoid data inconsistency, we are taking the entire process down.\n"
                  << group.prefix << "Process group watchdog thread terminated with exception: " << queued->text
                  << std::endl;
        std::abort();
      }
      return;
    }
  }

  std::mutex mutex_;
  std::list<GroupPtr> groups_;
};

class NCCLWork final : public c10d::Work {
 public:
  NCCLWork(int rank, OpType type, QueuedPtr queued, GroupPtr group, c10::DeviceIndex device, Tensors outputs,
           uint64_t number, bool blocks, bool is_barrier)
      : Work(rank, type), queued_(std::move(queued)), group_(std::move(group)), device_(device),
        outputs_(std::move(outputs)), number_(number), blocks_(blocks), is_barrier_(is_barrier) {}

  bool isCompleted() override { return queued_->get_error() || has_passed(queued_->end); }
  bool isSuccess() const override { return !queued_->get_error() && has_passed(queued_->end); }
  std::exception_ptr exception() const override { return queued_->get_error(); }
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  void blockCurrentStream() override { synchronize(); }
  void abort() override { group_->abort("Its work was aborted."); }

  void synchronize() override {
    enqueue_wait(device_, current_stream(device_), queued_->end);
    queued_->release();
  }

  bool wait(milliseconds timeout) override {
    synchronize();
    if (blocks_ || timeout != kNoTimeout) {
      const auto allowed = timeout == kNoTimeout ? queued_->timeout : timeout;
      while (!isCompleted() && !queued_->is_late(allowed, group_->prefix))
        std::this_thread::sleep_for(milliseconds(1));
    } else if (is_barrier_ && !isCompleted()) {
      synchronize_stream(device_, current_stream(device_));
    }
    if (auto error = queued_->get_error()) {
      group_->abort("Its work has failed.");
      std::rethrow_exception(error);
    }
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  const QueuedPtr queued_;
  const GroupPtr group_;
  const c10::DeviceIndex device_;
  const Tensors outputs_;
  const uint64_t number_;
  const bool blocks_, is_barrier_;
};
}  // namespace fake_cuda::nccl
