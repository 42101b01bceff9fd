// Messages between processes of one machine, for the fake NCCL: kept by the receiver until a kernel asks for them.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

namespace fake_cuda {

enum class Kind : uint32_t { COLLECTIVE, SEND, READY };

struct Key {
  uint64_t communicator;
  uint64_t number;  // of the operation in the communicator, or of the message between two ranks
  Kind kind;
  uint32_t source;
  bool operator<(const Key& other) const {
    return std::tie(communicator, number, kind, source) <
           std::tie(other.communicator, other.number, other.kind, other.source);
  }
};

using Sent = std::shared_ptr<std::atomic<bool>>;

// All of its threads are detached, and it is never destroyed: a process may end at any time, as with NCCL's threads.
class Wire {
 public:
  static Wire& get() {
    static Wire* wire = new Wire;
    return *wire;
  }

  const std::string& address() const { return address_; }

  // Never blocks. A message to a process that has died is lost, and is never marked as sent.
  Sent post(const std::string& address, const Key& key, std::string bytes) {
    auto sent = std::make_shared<std::atomic<bool>>(false);
    std::unique_lock<std::mutex> lock(mutex_);
    if (address == address_) {
      arrived_[key] = std::move(bytes);
      *sent = true;
      return sent;
    }
    auto& peer = peers_[address];
    if (!peer) {
      peer = new Peer;
      std::thread(&Wire::write_to, peer, address).detach();
    }
    lock.unlock();
    std::lock_guard<std::mutex> peer_lock(peer->mutex);
    peer->queue.push_back({key, std::move(bytes), sent});
    peer->changed.notify_one();
    return sent;
  }

  std::optional<std::string> take(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = arrived_.find(key);
    if (found == arrived_.end()) return std::nullopt;
    auto bytes = std::move(found->second);
    arrived_.erase(found);
    return bytes;
  }

  static uint64_t random() {
    static std::random_device device;
    return (uint64_t(device()) << 32) | device();
  }

 private:
  struct Message {
    Key key;
    std::string bytes;
    Sent sent;
  };
  struct Peer {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Message> queue;
  };

  Wire() : address_("fake-nccl-" + std::to_string(random())) {
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    auto [name, length] = name_of(address_);
    if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&name), length) || listen(listener, 256))
      throw std::runtime_error("the fake NCCL cannot listen");
    std::thread([this, listener] {
      for (int connection; (connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;)
        std::thread(&Wire::read_from, this, connection).detach();
    }).detach();
  }

  // An abstract name: it leaves no file behind.
  static std::pair<sockaddr_un, socklen_t> name_of(const std::string& address) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path + 1, address.data(), address.size());
    return {name, socklen_t(offsetof(sockaddr_un, sun_path) + 1 + address.size())};
  }

  static bool write_all(int connection, const void* data, size_t size) {
    for (auto* at = static_cast<const char*>(data); size;) {
      auto count = ::send(connection, at, size, MSG_NOSIGNAL);
      if (count <= 0) return false;
      at += count, size -= count;
    }
    return true;
  }

  static bool read_all(int connection, void* data, size_t size) {
    for (auto* at = static_cast<char*>(data); size;) {
      auto count = ::recv(connection, at, size, 0);
      if (count <= 0) return false;
      at += count, size -= count;
    }
    return true;
  }

  static void write_to(Peer* peer, std::string address) {
    int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    auto [name, length] = name_of(address);
    bool open = connect(connection, reinterpret_cast<sockaddr*>(&name), length) == 0;
    while (true) {
      std::unique_lock<std::mutex> lock(peer->mutex);
      peer->changed.wait(lock, [&] { return !peer->queue.empty(); });
      auto message = std::move(peer->queue.front());
      peer->queue.pop_front();
      lock.unlock();
      uint64_t size = message.bytes.size();
      open = open && write_all(connection, &message.key, sizeof(Key)) && write_all(connection, &size, sizeof size) &&
             write_all(connection, message.bytes.data(), size);
      if (open) *message.sent = true;
    }
  }

  void read_from(int connection) {
    Key key{};
    uint64_t size = 0;
    while (read_all(connection, &key, sizeof key) && read_all(connection, &size, sizeof size)) {
      std::string bytes(size, '\0');
      if (!read_all(connection, bytes.data(), size)) break;
      std::lock_guard<std::mutex> lock(mutex_);
      arrived_[key] = std::move(bytes);
    }
    close(connection);
  }

  const std::string address_;
  std::mutex mutex_;
  std::map<std::string, Peer*> peers_;
  std::map<Key, std::string> arrived_;
};

}  // namespace fake_cuda
