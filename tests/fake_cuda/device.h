// CUDA devices in host memory: streams whose work runs late and in order, events, and a caching allocator.
//
// One thread plays all devices of a process. Work is enqueued on a stream and run later: at the latest when the host
// waits for it. Where several streams could go on, FAKE_CUDA_ORDER decides which does, so that a wait that is missing
// between two streams gives wrong numbers.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace fake_cuda {

// A piece of work. It is called on the device's thread, without the GIL, until it returns true; while it returns false
// the stream waits, and other streams go on. So it must not block: work that waits for another process polls.
using Task = std::function<bool()>;

// Whether everything up to a point of a stream has run; marked by the device's thread.
struct Mark;
using MarkPtr = std::shared_ptr<Mark>;

int num_devices();
c10::DeviceIndex current_device();
c10::StreamId current_stream(c10::DeviceIndex device);  // of the calling thread
c10::StreamId new_stream(c10::DeviceIndex device, int priority);
size_t free_memory(c10::DeviceIndex device);  // that this process has left
std::string physical_id(c10::DeviceIndex device);  // the same in all processes for the same GPU
// Whether this is a fork of a process that has used its GPUs: it has no thread of a device, only locks as they were.
bool is_forked();

// A launch is what a program asks for, by its name; as on CUDA it blocks the host while the device has 1,024 of them
// (FAKE_CUDA_QUEUE) that it has not executed. null is for what the device does by itself.
void enqueue(c10::DeviceIndex device, c10::StreamId stream, Task task, const char* launch = nullptr);
void wait_for_room(c10::DeviceIndex device);  // for a launch: NCCL's wait before they are queued, under its lock
void enqueue_wait(c10::DeviceIndex device, c10::StreamId stream, MarkPtr mark);  // the stream waits for the mark
MarkPtr record(c10::DeviceIndex device, c10::StreamId stream);
bool has_passed(const MarkPtr& mark);
double passed_at(const MarkPtr& mark);  // in milliseconds of the host's steady clock, once it has passed
void wait_for(const MarkPtr& mark);  // blocks the host until the device is there; raises the device's errors
void synchronize_stream(c10::DeviceIndex device, c10::StreamId stream);
void synchronize_device(c10::DeviceIndex device);

// An error that every later call of the device raises, as CUDA's errors do.
void fail(const std::string& message);
void check();  // raises it

int64_t num_held_up();  // how often a full queue has blocked the host
// What was queued while it was traced, in order: "launch", "record" or "wait"; device; stream; name, or the mark's number.
using Trace = std::vector<std::tuple<std::string, int, int64_t, std::string>>;
Trace trace(bool begins);  // hands out the trace so far, and begins another one or ends it

void count_wait(const char* kind);    // of the host for the device
void count_launch(const char* name);  // of a kernel

}  // namespace fake_cuda

namespace at { class Tensor; }
namespace fake_cuda {
// A host tensor over the memory of a tensor on a device, without ownership: for tasks, which must not keep memory from
// the allocator (CUDA does not either). The caller sees to it that the memory outlives the task, as with record_stream.
at::Tensor borrowed(const at::Tensor& tensor);
void record_on_stream(const at::Tensor& tensor, c10::StreamId stream);  // as Tensor.record_stream
}  // namespace fake_cuda
