// The thread that plays the devices, its streams and their marks.
#include "device.h"

#include <Python.h>
#include <pthread.h>
#include <c10/util/Exception.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

extern "C" void omp_set_num_threads(int);

namespace fake_cuda {
namespace {
using Clock = std::chrono::steady_clock;
using StreamKey = std::pair<int, int64_t>;  // device, stream

const char* environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

struct Released {  // the GIL is free while the host waits: a task may need it
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~Released() { if (state) PyEval_RestoreThread(state); }
};

std::atomic<int64_t> next_mark{0};
}  // namespace

struct Mark {
  const int64_t number = next_mark++;
  std::atomic<bool> done{false};
  std::atomic<double> passed_at{0};
  StreamKey stream;
};

namespace {
struct Item {  // one of three
  Task task;
  MarkPtr awaited, passed;
  bool is_launch = false;
  Clock::time_point due{};
};

struct Queue {
  int device = 0;
  std::deque<Item> items;
  Clock::time_point next_poll{};  // of an item that could not finish yet
};

thread_local bool is_player = false;

// Which stream goes on: what the host waits for and nothing else ("late"), everything else first ("early"), or any.
enum class Order { late, early, random };

class Player {
 public:
  Player() {
    const std::string order = environment("FAKE_CUDA_ORDER", "late");
    order_ = order == "late" ? Order::late : order == "early" ? Order::early : Order::random;
    random_.seed(std::atoi(environment("FAKE_CUDA_SEED", "0")));
    launch_queue_ = std::atoi(environment("FAKE_CUDA_QUEUE", "1024"));
    lateness_ = std::chrono::microseconds(std::atoi(environment("FAKE_CUDA_LATE_US", "20000")));
    std::thread([this] { play(); }).detach();
  }

  void enqueue(StreamKey key, Item item, const char* name) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopped_) return;
    if (item.is_launch) ++launches_[key.first];
    if (traces_) {
      const auto& mark = item.awaited ? item.awaited : item.passed;
      const char* kind = item.awaited ? "wait" : item.passed ? "record" : "launch";
      trace_.emplace_back(kind, key.first, key.second, mark ? std::to_string(mark->number) : name);
    }
    if (item.awaited && item.awaited->done) return;
    item.due = Clock::now() + lateness_;
    auto& queue = queues_[key];
    queue.device = key.first;
    queue.items.push_back(std::move(item));
    work_.notify_one();
  }

  void wait_for(const MarkPtr& mark) {
    if (mark->done) return;
    Released released;
    std::unique_lock<std::mutex> lock(mutex_);
    targets_.push_back(mark->stream);
    work_.notify_one();
    passed_.wait(lock, [&] { return mark->done || stopped_; });
    for (auto it = targets_.begin(); it != targets_.end(); ++it)
      if (*it == mark->stream) { targets_.erase(it); break; }
  }

  int64_t num_held_up() const { return num_held_up_; }

  Trace trace(bool begins) {
    std::unique_lock<std::mutex> lock(mutex_);
    traces_ = begins;
    return std::exchange(trace_, {});
  }

  std::vector<StreamKey> streams(int device) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::vector<StreamKey> keys;
    for (auto& [key, queue] : queues_) if (key.first == device) keys.push_back(key);
    return keys;
  }

  void stop() {
    Released released;
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    passed_.notify_all();
    work_.notify_one();
    ended_.wait_for(lock, std::chrono::seconds(10), [this] { return has_ended_; });
  }

  // The host goes on once one launch of a full queue has been executed; the oldest is the first that it waits for.
  void wait_for_room(int device) {
    // A task that launches something must not wait for the tasks behind it.
    if (is_player || launches_[device] < launch_queue_) return;
    Released released;
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_held_up_;
    while (launches_[device] >= launch_queue_ && !stopped_) {
      const std::pair<const StreamKey, Queue>* oldest = nullptr;
      for (const auto& entry : queues_)
        if (entry.first.first == device && !entry.second.items.empty() &&
            (!oldest || entry.second.items.front().due < oldest->second.items.front().due))
          oldest = &entry;
      const int before = launches_[device];
      const auto target = oldest->first;
      targets_.push_back(target);
      work_.notify_one();
      passed_.wait(lock, [&] { return launches_[device] < before || stopped_; });
      targets_.erase(std::find(targets_.begin(), targets_.end(), target));
    }
  }

 private:
  void play() {
    is_player = true;
    at::get_num_threads();  // torch sets the number of a new thread at its first use
    omp_set_num_threads(1);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::NoGradGuard no_grad;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_) {
      Queue* queue = choose();
      if (!queue) {  // an idle process is to cost nothing: tests have dozens
        if (const auto moment = next_moment()) work_.wait_until(lock, *moment);
        else work_.wait(lock);
        continue;
      }
      run(*queue, lock);
    }
    has_ended_ = true;
    ended_.notify_all();
  }

  void run(Queue& queue, std::unique_lock<std::mutex>& lock) {
    Item& item = queue.items.front();  // a deque keeps its place while others are added behind
    bool finished = true;
    if (item.task) {
      lock.unlock();
      try { finished = item.task(); } catch (const std::exception& error) { fail(error.what()); }
      lock.lock();
    }
    if (!finished) { queue.next_poll = Clock::now() + std::chrono::microseconds(100); return; }
    Item ended = std::move(queue.items.front());
    queue.items.pop_front();
    if (ended.is_launch) {
      --launches_[queue.device];
      if (!targets_.empty()) passed_.notify_all();
    }
    if (ended.passed) {
      const auto now = Clock::now().time_since_epoch();
      ended.passed->passed_at = std::chrono::duration<double, std::milli>(now).count();
      ended.passed->done = true;
      if (!targets_.empty()) passed_.notify_all();
    }
    lock.unlock();  // what the task holds is freed outside the lock
    ended = Item();
    lock.lock();
  }

  bool can_go_on(const Queue& queue, Clock::time_point now) const {
    if (queue.items.empty() || now < queue.next_poll) return false;
    const Item& head = queue.items.front();
    return !head.awaited || head.awaited->done;
  }

  // The stream that a waiting host needs next: its own, or the one whose mark that one waits for.
  Queue* needed(StreamKey key, Clock::time_point now) {
    for (int depth = 0; depth < 1000; ++depth) {
      Queue& queue = queues_[key];
      if (queue.items.empty()) return nullptr;
      const Item& head = queue.items.front();
      if (!head.awaited || head.awaited->done) return now < queue.next_poll ? nullptr : &queue;
      key = head.awaited->stream;
    }
    return nullptr;
  }

  Queue* choose() {
    const auto now = Clock::now();
    std::vector<Queue*> needed_now, others;
    for (const auto& key : targets_)
      if (Queue* queue = needed(key, now)) needed_now.push_back(queue);
    const bool host_waits = !targets_.empty();
    for (auto& [key, queue] : queues_) {
      if (!can_go_on(queue, now)) continue;
      if (std::find(needed_now.begin(), needed_now.end(), &queue) != needed_now.end()) continue;
      const bool is_due = queue.items.front().due <= now || (host_waits && order_ != Order::late);
      if (is_due) others.push_back(&queue);
    }
    auto& first = order_ == Order::early ? others : needed_now;
    auto& second = order_ == Order::early ? needed_now : others;
    if (order_ == Order::random) {
      first.insert(first.end(), second.begin(), second.end());
      second.clear();
    }
    auto& from = first.empty() ? second : first;
    if (from.empty()) return nullptr;
    return from[from.size() == 1 ? 0 : random_() % from.size()];
  }

  // When a stream can go on by itself; until then only a call changes anything.
  std::optional<Clock::time_point> next_moment() {
    std::vector<Queue*> needed_next;
    for (const auto& key : targets_)
      if (Queue* queue = needed(key, Clock::time_point::max())) needed_next.push_back(queue);
    std::optional<Clock::time_point> next;
    for (auto& [key, queue] : queues_) {
      if (queue.items.empty()) continue;
      const Item& head = queue.items.front();
      if (head.awaited && !head.awaited->done) continue;
      const bool is_needed = std::find(needed_next.begin(), needed_next.end(), &queue) != needed_next.end();
      const bool is_at_once = is_needed || (!targets_.empty() && order_ != Order::late);
      const auto moment = is_at_once ? queue.next_poll : std::max(queue.next_poll, head.due);
      if (!next || moment < *next) next = moment;
    }
    return next;
  }

  std::mutex mutex_;
  std::condition_variable work_, passed_, ended_;
  std::map<StreamKey, Queue> queues_;  // a node stays where it is
  std::vector<StreamKey> targets_;     // for which hosts wait
  Order order_;
  std::array<std::atomic<int>, 16> launches_{};  // by device, those that are queued
  int launch_queue_;  // launches that a device has not executed, at most: further ones hold the host up
  std::atomic<int64_t> num_held_up_{0};
  bool traces_ = false;
  Trace trace_;
  std::mt19937 random_;
  std::chrono::microseconds lateness_;
  bool stopped_ = false, has_ended_ = false;
};

std::atomic<Player*> the_player{nullptr};
std::mutex making;
std::atomic<bool> forked{false};

Player& player() {  // made at the first use, not before a fork; never freed, since its thread may run
  Player* found = the_player;
  if (found) return *found;
  std::lock_guard<std::mutex> lock(making);
  if (!the_player) {
    the_player = new Player();
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  }
  return *the_player;
}

std::mutex failing;
std::string failure;
std::atomic<bool> has_failed{false};
std::atomic<int64_t> next_stream{1};
}  // namespace

bool is_forked() { return forked; }

void enqueue(c10::DeviceIndex device, c10::StreamId stream, Task task, const char* launch) {
  check();
  // NCCL's are queued under a lock, before which they wait.
  if (launch && std::strncmp(launch, "nccl", 4) != 0) wait_for_room(device);
  player().enqueue({device, stream}, {std::move(task), nullptr, nullptr, launch != nullptr}, launch ? launch : "");
}

void wait_for_room(c10::DeviceIndex device) { player().wait_for_room(device); }

void enqueue_wait(c10::DeviceIndex device, c10::StreamId stream, MarkPtr mark) {
  if (mark && !forked) player().enqueue({device, stream}, {nullptr, std::move(mark), nullptr}, "");
}

MarkPtr record(c10::DeviceIndex device, c10::StreamId stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = {device, stream};
  if (!forked) player().enqueue(mark->stream, {nullptr, nullptr, mark}, "");
  return mark;
}

int64_t num_held_up() { return the_player.load() ? player().num_held_up() : 0; }
Trace trace(bool begins) { return player().trace(begins); }

double passed_at(const MarkPtr& mark) { return mark->passed_at; }
bool has_passed(const MarkPtr& mark) { return !mark || mark->done; }

void wait_for(const MarkPtr& mark) {
  if (mark && !forked) player().wait_for(mark);
  check();
}

void synchronize_stream(c10::DeviceIndex device, c10::StreamId stream) { wait_for(record(device, stream)); }

void synchronize_device(c10::DeviceIndex device) {
  if (the_player.load())
    for (const auto& [_, stream] : player().streams(device)) wait_for(record(device, stream));
  check();
}

c10::StreamId new_stream(c10::DeviceIndex, int) { return next_stream++; }

void fail(const std::string& message) {
  std::lock_guard<std::mutex> lock(failing);
  if (!has_failed) failure = message;
  has_failed = true;
}

void check() {
  if (!has_failed) return;
  std::lock_guard<std::mutex> lock(failing);
  TORCH_CHECK(false, "CUDA error: device-side assert triggered (", failure, ")");
}

void stop() { if (Player* found = the_player) found->stop(); }
}  // namespace fake_cuda
