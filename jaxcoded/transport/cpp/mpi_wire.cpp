#include "mpi_wire.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

namespace jaxcoded {
namespace {

// On one host a copy out of the other's memory is faster than a message, but for short ones.
constexpr std::size_t inline_near = 1024;
constexpr std::size_t inline_far = 32768;
constexpr std::size_t inbox_bytes = 64 << 10;
constexpr int most_at_once = 100;
// Of what rank after rank adds to, such as texts. No honest one comes near.
constexpr std::size_t longest_body = 64 << 20;

// Whether MPI reports with this class of errors that the other rank is dead. It does where it is fault-tolerant.
bool reports_death([[maybe_unused]] int error) {
#ifdef MPIX_ERR_PROC_FAILED
  return error == MPIX_ERR_PROC_FAILED;
#else
  return false;
#endif
}

// What a piece in a message begins with.
struct Stamp {
  std::uint64_t session, round, version, piece, what;
};

}  // namespace

bool fault_tolerant() {
#ifdef MPIX_FT
  int* enabled = nullptr;
  int known = 0;
  const int outcome = MPI_Comm_get_attr(MPI_COMM_WORLD, MPIX_FT, &enabled, &known);
  return outcome == MPI_SUCCESS && known && enabled && *enabled;
#else
  return false;
#endif
}

MpiWire::MpiWire(MPI_Comm comm, std::uint64_t session, const std::vector<Rank>& peers,
                 const std::vector<Card>& cards, Validity& validity,
                 const std::atomic<std::uint32_t>& messages, SharedMemory& memory)
    : comm_(comm),
      session_(session),
      validity_(validity),
      memory_(memory),
      messages_(messages),
      ranks_(peers),
      inboxes_(peers.size(), MPI_REQUEST_NULL),
      indices_(peers.size()),
      statuses_(peers.size()),
      next_tag_(tag::first_vector + static_cast<int>(session % (tag::last_vector - tag::first_vector))) {
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  for (const Rank rank : ranks_) {
    Peer& peer = peers_[rank];
    peer.page = PeerPage::open(cards[static_cast<std::size_t>(rank)]);
    peer.inbox.resize(inbox_bytes);
    silent_peers_ |= !peer.page;
  }
  // What is posted here MPI writes to: nothing may be thrown any more.
  for (std::size_t i = 0; i < ranks_.size(); ++i) receive(i);
}

MpiWire::~MpiWire() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized) return;
  for (std::size_t i = 0; i < inboxes_.size(); ++i) {
    MPI_Request& request = inboxes_[i];
    if (request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&request);
    int over = 0;
    MPI_Test(&request, &over, MPI_STATUS_IGNORE);
    if (over) continue;
    // What has come in part may stay away, where its sender is stopped.
    MPI_Request_free(&request);
    new std::vector<std::byte>(std::move(peers_[ranks_[i]].inbox));
  }
  // Nobody will send these any more, or take those. Their memory must outlive them.
  for (Fetching& it : fetches_) {
    MPI_Cancel(&it.request);
    MPI_Request_free(&it.request);
    new std::vector<std::byte>(std::move(it.bytes));
  }
  for (Outgoing& it : outgoing_) {
    MPI_Request_free(&it.request);
    new std::vector<std::byte>(std::move(it.bytes));
  }
}

void MpiWire::receive(std::size_t peer) {
  std::vector<std::byte>& inbox = peers_[ranks_[peer]].inbox;
  MPI_Irecv(inbox.data(), static_cast<int>(inbox.size()), MPI_BYTE, ranks_[peer], tag::control,
            comm_,
            &inboxes_[peer]);
}

void MpiWire::receive(Fetching& it) {
  MPI_Irecv(it.bytes.data(), static_cast<int>(it.bytes.size()), MPI_BYTE, it.from, it.tag, comm_,
            &it.request);
}

void MpiWire::post(Rank to, int tag, std::vector<std::byte> bytes) {
  Outgoing& it = outgoing_.emplace_back(MPI_REQUEST_NULL, to, std::move(bytes));
  MPI_Isend(it.bytes.data(), static_cast<int>(it.bytes.size()), MPI_BYTE, to, tag, comm_,
            &it.request);
  int sent = 0;
  if (MPI_Test(&it.request, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS || sent) outgoing_.pop_back();
  tell(to);
}

// There is something for that rank to ask MPI for.
void MpiWire::tell(Rank to) const {
  const auto peer = peers_.find(to);
  if (peer != peers_.end() && peer->second.page) peer->second.page->tell();
}

// What an inbox cannot hold goes in several messages, which arrive one after the other.
void MpiWire::send(Rank to, const Message& message) {
  Header header = message.header;
  header.session = session_;
  std::span<const std::byte> body = message.body;
  for (constexpr std::size_t most = inbox_bytes - sizeof header; body.size() > most;) {
    Header first = header;
    first.flags |= continued;
    post(to, tag::control, Message::bytes(first, body.first(most)));
    body = body.subspan(most);
  }
  post(to, tag::control, Message::bytes(header, body));
}

Wire::Fetch MpiWire::fetch(Rank from, Object object, std::uint32_t piece, std::uint64_t address,
                           std::byte* to, std::size_t bytes, Copy how) {
  Peer& peer = peers_[from];
  const PeerPage* page = peer.page.get();
  if (page && page->readable()) {
    const double before = now();
    const bool read = page->read(address, to, bytes, how);
    peer.link.seconds += now() - before;
    if (read) peer.link.bytes += bytes;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!page->valid(static_cast<std::size_t>(object.what), object.round)) return Fetch::gone;
    if (read) return Fetch::done;
    // It is there, but cannot be read from here: let it be sent.
  }
  if (peer.fetches++ == 0) peer.since = now();
  next_tag_ = next_tag_ == tag::last_vector ? tag::first_vector : next_tag_ + 1;
  receive(fetches_.emplace_back(MPI_REQUEST_NULL, from, next_tag_, object, piece,
                                std::vector<std::byte>(sizeof(Stamp) + bytes)));
  Message pull{{.kind = Kind::pull, .round = object.round, .fingerprint = object.version}};
  pull.header.flags = static_cast<std::uint8_t>(object.what);
  pull.header.ready = piece;
  pull.header.last = static_cast<Round>(next_tag_);
  send(from, pull);
  return Fetch::pending;
}

// Vectors are copied: their memory may be used for something else before they have left.
void MpiWire::answer(Rank from, const Header& pull, const Node& node) {
  if (pull.last < tag::first_vector || pull.last > tag::last_vector) throw Damaged();
  const auto what = static_cast<Object::What>(pull.flags);
  const Stamp stamp{session_, pull.round, pull.fingerprint, pull.ready, pull.flags};
  std::vector<std::byte> bytes(sizeof stamp);
  std::memcpy(bytes.data(), &stamp, sizeof stamp);
  if (const auto data = node.read({what, pull.round, pull.fingerprint}, pull.ready)) {
    bytes.resize(sizeof stamp + data->size());
    if (!data->empty()) std::memcpy(bytes.data() + sizeof stamp, data->data(), data->size());
  }
  post(from, static_cast<int>(pull.last), std::move(bytes));
}

void MpiWire::withdraw(Object::What what, Round first_valid) {
  validity_.first_valid[static_cast<std::size_t>(what)].store(first_valid);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

Source& MpiWire::memory() {
  const bool near = std::ranges::any_of(ranks_, [&](Rank rank) { return direct(rank); });
  return near ? static_cast<Source&>(memory_) : heap;
}

std::size_t MpiWire::inline_bytes(Rank to) const {
  const auto peer = peers_.find(to);
  return peer != peers_.end() && peer->second.page && peer->second.page->readable() ? inline_near
                                                                                   : inline_far;
}

bool MpiWire::direct(Rank from) const {
  const auto peer = peers_.find(from);
  return peer != peers_.end() && peer->second.page && peer->second.page->readable();
}

std::map<Rank, Link> MpiWire::links() const {
  std::map<Rank, Link> out;
  for (const auto& [rank, peer] : peers_) {
    if (peer.link.bytes) out[rank] = peer.link;
  }
  return out;
}

double MpiWire::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What has come to the inboxes. Whether anything has.
bool MpiWire::open_inboxes(Node& node) {
  int count = 0, outcome = MPI_SUCCESS;
  if (inboxes_.empty()) return false;
  // Open MPI looks at its requests first and makes progress afterwards: what has just come is
  // seen by the second look.
  for (int look = 0; look < 2 && count <= 0; ++look) {
    outcome = MPI_Testsome(static_cast<int>(inboxes_.size()), inboxes_.data(), &count,
                           indices_.data(), statuses_.data());
  }
  bool news = false;
  for (int i = 0; i < count; ++i) {
    const auto peer = static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]);
    const MPI_Status& status = statuses_[static_cast<std::size_t>(i)];
    int error = MPI_SUCCESS;
    if (outcome == MPI_ERR_IN_STATUS) MPI_Error_class(status.MPI_ERROR, &error);
    if (error == MPI_SUCCESS) {
      open_inbox(peer, status, node);
    } else if (error == MPI_ERR_TRUNCATE) {
      node.garbled(ranks_[peer], "one that is too long");
    } else {
      if (reports_death(error)) node.lost(ranks_[peer]);
      inboxes_[peer] = MPI_REQUEST_NULL;  // nothing has come; the next look tries it again
      continue;
    }
    receive(peer);
    news = true;
  }
  return news;
}

void MpiWire::open_inbox(std::size_t peer, const MPI_Status& status, Node& node) {
  const Rank from = ranks_[peer];
  Peer& its = peers_[from];
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  its.link.bytes += static_cast<std::uint64_t>(bytes);
  try {
    Message message = Message::from(std::span(its.inbox).first(static_cast<std::size_t>(bytes)));
    if (message.header.session != session_) return;
    const bool more = (message.header.flags & continued) != 0;
    if (more || !its.begun.empty()) {
      its.begun.insert(its.begun.end(), message.body.begin(), message.body.end());
      if (its.begun.size() > longest_body) {
        its.begun = {};
        throw Damaged();
      }
      if (more) return;
      message.body = std::exchange(its.begun, {});
    }
    if (message.header.kind == Kind::pull) {
      answer(from, message.header, node);
    } else {
      node.deliver(from, message);
    }
  } catch (const Damaged&) {
    node.garbled(from, "one of " + std::to_string(bytes) + " bytes");
  }
}

// What has become of everything that is on its way, in its order. One look at the network for all of
// it: a look for each takes more time than what comes.
const std::vector<MpiWire::Completion>& MpiWire::complete_some() {
  auto& [requests, indices, statuses, found] = look_;
  requests.clear();
  for (const Outgoing& it : outgoing_) requests.push_back(it.request);
  for (const Fetching& it : fetches_) requests.push_back(it.request);
  found.assign(requests.size(), {});
  if (requests.empty()) return found;
  indices.resize(requests.size());
  statuses.resize(requests.size());
  int count = 0, outcome = MPI_SUCCESS;
  for (int look = 0; look < 2 && count <= 0; ++look) {  // as with inboxes
    outcome = MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count,
                           indices.data(), statuses.data());
  }
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    Completion& it = found[static_cast<std::size_t>(indices[at])];
    it.status = statuses[at];
    const bool well = outcome != MPI_ERR_IN_STATUS || it.status.MPI_ERROR == MPI_SUCCESS;
    it.state = well ? Completion::done : Completion::failed;
  }
  std::size_t next = 0;
  for (Outgoing& it : outgoing_) it.request = requests[next++];
  for (Fetching& it : fetches_) it.request = requests[next++];
  return found;
}

bool MpiWire::poll(Node& node, bool anyway) {
  sent_ = messages_.load();
  if (!anyway && sent_ == had_ && !silent_peers_ && !unfinished()) return false;
  bool news = false;
  for (std::size_t i = 0; i < inboxes_.size(); ++i) {
    if (inboxes_[i] == MPI_REQUEST_NULL) receive(i);  // it had an error
  }
  // An inbox holds one message. All that was sent before the last wake-up must be seen now.
  for (int i = 0; i < most_at_once && open_inboxes(node); ++i) news = true;
  const std::vector<Completion>& completions = complete_some();
  auto completion = completions.begin();
  for (auto it = outgoing_.begin(); it != outgoing_.end();) {
    if (completion++->state != Completion::pending) {
      it = outgoing_.erase(it);
    } else {
      tell(it++->to);  // MPI sends a long one in parts
    }
  }
  // What has come may make the node ask for more, at the end of the list.
  for (auto it = fetches_.begin(); completion != completions.end(); ++completion) {
    if (completion->state == Completion::pending) {
      ++it;
      continue;
    }
    const bool lost = completion->state == Completion::failed;
    const MPI_Status& status = completion->status;
    int bytes = 0;
    if (!lost) MPI_Get_count(&status, MPI_BYTE, &bytes);
    const Stamp expected{session_, it->object.round, it->object.version, it->piece,
                         static_cast<std::uint64_t>(it->object.what)};
    const bool stamped = static_cast<std::size_t>(bytes) >= sizeof(Stamp);
    if (stamped && std::memcmp(it->bytes.data(), &expected, sizeof expected) != 0) {
      receive(*it++);  // an answer to somebody else, who has left
      continue;
    }
    const Fetching fetched = std::move(*it);
    it = fetches_.erase(it);
    Peer& peer = peers_[fetched.from];
    peer.link.bytes += static_cast<std::uint64_t>(bytes);
    if (--peer.fetches == 0) peer.link.seconds += now() - peer.since;
    std::span<const std::byte> data;  // none, or all that was asked for
    if (static_cast<std::size_t>(bytes) == fetched.bytes.size()) {
      data = std::span(fetched.bytes).subspan(sizeof(Stamp));
    }
    node.arrived(fetched.from, fetched.object, fetched.piece, data);
    news = true;
  }
  return news;
}

}  // namespace jaxcoded
