// The kernels of the fake NCCL: each sends, receives, reduces and writes, a little at a time, on the device's thread.
#pragma once
#include "device.h"
#include "wire.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <list>
#include <vector>

namespace fake_cuda::nccl {
using at::Tensor;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using Messages = std::map<int, std::string>;  // by rank

// Memory of the device, as the kernels see it.

inline Tensor flat(const Tensor& tensor) {  // in the order of its memory
  auto alias = borrowed(tensor);
  return alias.as_strided({alias.numel()}, {1}, alias.storage_offset());
}
inline std::string bytes_of(const Tensor& values) {
  return std::string(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
}
inline Tensor values_of(const std::string& bytes, c10::ScalarType type) {
  return at::from_blob(const_cast<char*>(bytes.data()), {int64_t(bytes.size() / c10::elementSize(type))},
                       at::TensorOptions().dtype(type));
}
inline void write(const Tensor& to, const std::string& bytes) {
  TORCH_CHECK(to.nbytes() == bytes.size(), "NCCL: ranks disagree: ", bytes.size(), " bytes came for ", to.nbytes());
  if (!bytes.empty()) std::memcpy(to.mutable_data_ptr(), bytes.data(), bytes.size());
}

// Reductions.

struct Reduction {
  ReduceOp::RedOpType op;
  double factor = 1;      // by which each rank multiplies its values first
  Tensor device_factor;  // instead of it
  c10::ScalarType type;

  bool is_float8() const { return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2; }

  Reduction(const ReduceOp& wanted, c10::ScalarType scalar_type, int size) : op(wanted), type(scalar_type) {
    const bool floating = c10::isFloatingType(type);
    if (op == ReduceOp::BAND) C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BAND with NCCL");
    if (op == ReduceOp::BOR) C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BOR with NCCL");
    if (op == ReduceOp::BXOR) C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BXOR with NCCL");
    if (type == at::kBool && op == ReduceOp::AVG)
      C10_THROW_ERROR(TypeError, "Cannot use ReduceOp.AVG with boolean inputs");
    if (op == ReduceOp::AVG && floating) factor = 1.0 / size;
    if (op == ReduceOp::PREMUL_SUM) {
      if (!floating || is_float8())
        C10_THROW_ERROR(TypeError, "PreMulSum Data type must be half, bfloat16, float, or double");
      const auto* supplement = static_cast<const c10d::PreMulSumSupplement*>(wanted.supplement_.get());
      factor = supplement->double_factor;
      if (supplement->tensor_factor.defined()) device_factor = borrowed(supplement->tensor_factor);
    }
  }

  std::string sent(const Tensor& values) const {
    if (device_factor.defined()) return bytes_of(values.mul(device_factor.to(type)));
    return bytes_of(factor == 1 ? values : values.mul(at::scalar_tensor(factor, values.options())));
  }

  // The ring's order for the part of a rank: from its neighbour on, around to itself. No tree adds in it.
  Tensor operator()(const Tensors& parts, int rank) const {
    const int size = parts.size();
    const auto take = [&](int k) {
      const auto& part = parts[(rank + 1 + k) % size];
      return type == at::kBool ? part.view(at::kByte) : is_float8() ? part.to(at::kFloat) : part;
    };
    Tensor sum = take(0).clone();
    for (int k = 1; k < size; ++k) {
      const auto next = take(k);
      if (op == ReduceOp::MIN) sum = at::minimum(sum, next);
      else if (op == ReduceOp::MAX || type == at::kBool) sum = at::maximum(sum, next);
      else if (op == ReduceOp::PRODUCT) sum.mul_(next);
      else sum.add_(next);
      if (is_float8()) sum = sum.to(type).to(at::kFloat);
    }
    if (op == ReduceOp::AVG && !c10::isFloatingType(type)) sum = at::div(sum, size, "trunc");
    return type == at::kBool ? sum.view(at::kBool) : sum.to(type);
  }
};

// Communicators.

struct Communicator {
  uint64_t id = 0;
  int rank = 0;  // in the group, as all ranks here
  std::map<int, std::string> addresses;  // by rank
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  uint64_t num_collectives = 0;
  std::map<int, uint64_t> num_sent, num_received;  // by peer
  MarkPtr last;  // NCCL runs the operations of a communicator in the order of the calls, whatever their streams
  std::atomic<bool> aborted{false};
  std::string reason;

  void check() const {
    if (!aborted) return;
    C10_THROW_ERROR(DistBackendError, c10::str("NCCL communicator was aborted on rank ", rank, ". ", reason));
  }
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

struct Out {
  int peer;
  std::function<std::string()> bytes;
};

// What a rank does in one operation: it sends, receives, and writes results.
struct Exchange {
  Kind kind = Kind::COLLECTIVE;
  std::vector<Out> outs;
  std::vector<int> ins;  // ranks
  std::function<void(Messages&)> finish = [](Messages&) {};
  Tensors written;  // borrowed
  uint64_t number = 0;
};

// The kernel of one operation, or of several that were grouped.
class Kernel {
 public:
  Kernel(CommunicatorPtr communicator, std::vector<Exchange> exchanges)
      : communicator_(std::move(communicator)), exchanges_(std::move(exchanges)), arrived_(exchanges_.size()) {}

  bool advance() {
    if (communicator_->aborted) {
      leave_half();
      return true;
    }
    if (!started_) start();
    for (auto it = held_.begin(); it != held_.end();) {  // sends wait for their receiver, as NCCL's large ones do
      const auto& [exchange, out] = *it;
      if (!Wire::get().take(key(*exchange, Kind::READY, out->peer))) { ++it; continue; }
      post(*exchange, *out);
      it = held_.erase(it);
    }
    bool complete = held_.empty();
    for (size_t k = 0; k < exchanges_.size(); ++k)
      for (int peer : exchanges_[k].ins) {
        if (arrived_[k].count(peer)) continue;
        if (auto bytes = Wire::get().take(key(exchanges_[k], exchanges_[k].kind, peer)))
          arrived_[k][peer] = std::move(*bytes);
        else
          complete = false;
      }
    for (const auto& sent : sent_) complete = complete && *sent;
    if (!complete) return false;
    for (size_t k = 0; k < exchanges_.size(); ++k) exchanges_[k].finish(arrived_[k]);
    return true;
  }

 private:
  void start() {
    started_ = true;
    for (auto& exchange : exchanges_) {
      const bool between_two = exchange.kind == Kind::SEND;
      for (auto& out : exchange.outs) {
        if (between_two) held_.emplace_back(&exchange, &out);
        else post(exchange, out);
      }
      for (int peer : exchange.ins)
        if (between_two)
          sent_.push_back(Wire::get().post(communicator_->addresses.at(peer), mine(exchange, Kind::READY), ""));
    }
  }

  void post(const Exchange& exchange, const Out& out) {
    const auto& address = communicator_->addresses.at(out.peer);
    sent_.push_back(Wire::get().post(address, mine(exchange, exchange.kind), out.bytes()));
  }

  Key key(const Exchange& exchange, Kind kind, int source) const {
    return {communicator_->id, exchange.number, kind, uint32_t(source)};
  }
  Key mine(const Exchange& exchange, Kind kind) const { return key(exchange, kind, communicator_->rank); }

  void leave_half() {
    for (auto& exchange : exchanges_)
      for (auto& tensor : exchange.written)
        if (tensor.nbytes()) std::memset(tensor.mutable_data_ptr(), 0x42, (tensor.nbytes() + 1) / 2);
  }

  CommunicatorPtr communicator_;
  std::vector<Exchange> exchanges_;
  std::vector<Messages> arrived_;  // by exchange
  std::list<std::pair<Exchange*, Out*>> held_;
  std::vector<Sent> sent_;
  bool started_ = false;
};
}  // namespace fake_cuda::nccl
