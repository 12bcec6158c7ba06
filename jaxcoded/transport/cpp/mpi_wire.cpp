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

// On one host a copy from the other process's memory is faster than a message, except for short vectors.
constexpr std::size_t inline_near = 1024;
constexpr std::size_t inline_far = 32768;
constexpr std::size_t inbox_bytes = 64 << 10;
constexpr int most_at_once = 100;
constexpr std::uint64_t tags = tag::last_vector - tag::first_vector + 1;  // of pieces
// Limits bodies that grow from rank to rank, such as texts. No honest body comes near this length.
constexpr std::size_t longest_body = 64 << 20;

// Whether this class of errors means that the other rank is dead. Only a fault-tolerant MPI reports that.
bool reports_death([[maybe_unused]] int error) {
#ifdef MPIX_ERR_PROC_FAILED
  return error == MPIX_ERR_PROC_FAILED;
#else
  return false;
#endif
}

// Whether it is useless to send anything again after this class of errors.
bool is_final([[maybe_unused]] int error) {
#ifdef MPIX_ERR_REVOKED
  if (error == MPIX_ERR_REVOKED) return true;
#endif
  return reports_death(error);
}

// Whether MPI has failed to do something, but may succeed the next time.
bool may_try_again(int outcome) {
  int error = MPI_SUCCESS;
  if (outcome != MPI_SUCCESS) MPI_Error_class(outcome, &error);
  return error != MPI_SUCCESS && !is_final(error);
}

// The beginning of a message that contains a piece.
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

std::optional<int> outcome_of(MPI_Request& request) noexcept {
  int over = 0;
  MPI_Status status;
  MPI_Request_get_status(request, &over, &status);
  if (!over) return std::nullopt;
  return MPI_Test(&request, &over, MPI_STATUS_IGNORE);
}

MpiWire::MpiWire(MPI_Comm comm, std::uint64_t session, const std::vector<Rank>& peers,
                 const std::vector<Card>& cards, Validity& validity,
                 const std::atomic<std::uint32_t>& messages, Source& shared_memory, Source& memory)
    : comm_(comm),
      session_(session),
      validity_(validity),
      shared_memory_(shared_memory),
      memory_(memory),
      messages_(messages),
      ranks_(peers),
      inboxes_(peers.size(), MPI_REQUEST_NULL),
      indices_(peers.size()),
      statuses_(peers.size()),
      fetched_(session % tags) {
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  for (const Rank rank : ranks_) {
    Peer& peer = peers_[rank];
    peer.page = PeerPage::open(cards[static_cast<std::size_t>(rank)]);
    peer.inbox = std::make_unique<std::byte[]>(inbox_bytes);
    silent_peers_ |= !peer.page;
  }
  // MPI writes to the memory posted here, so from now on nothing may be thrown.
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
    // A message that has come in part may never be complete, if its sender is stopped.
    if (!outcome_of(request)) static_cast<void>(peers_[ranks_[i]].inbox.release());
  }
  // No rank will send these pieces or take these messages any more. MPI may still use their memory, so it is
  // never freed.
  for (Transfer& transfer : fetches_) {
    if (transfer.request != MPI_REQUEST_NULL) MPI_Cancel(&transfer.request);
  }
  for (Transfers* const transfers : {&fetches_, &outgoing_}) {
    transfers->remove_if([](Transfer& transfer) { return outcome_of(transfer.request).has_value(); });
    left_to_mpi_->splice(left_to_mpi_->end(), *transfers);
  }
  if (!left_to_mpi_->empty()) static_cast<void>(left_to_mpi_.release());
}

void MpiWire::receive(std::size_t peer) {
  MPI_Irecv(peers_[ranks_[peer]].inbox.get(), static_cast<int>(inbox_bytes), MPI_BYTE, ranks_[peer],
            tag::control, comm_, &inboxes_[peer]);
}

void MpiWire::receive(Transfer& transfer) noexcept {
  transfer.received = 0;
  const int outcome = MPI_Irecv(transfer.bytes.data(), static_cast<int>(transfer.bytes.size()), MPI_BYTE,
                                transfer.other, transfer.tag, comm_, &transfer.request);
  transfer.state = may_try_again(outcome) ? Transfer::refused : Transfer::pending;
}

// Send a message. Returns whether MPI lacked the resources to take it. Nothing is sent to a dead rank, or over
// an unusable communicator.
bool MpiWire::refused(Transfer& transfer) noexcept {
  return may_try_again(MPI_Isend(transfer.bytes.data(), static_cast<int>(transfer.bytes.size()), MPI_BYTE,
                                 transfer.other, transfer.tag, comm_, &transfer.request));
}

void MpiWire::post(Transfers ready) noexcept {
  while (!ready.empty()) {
    Transfer& transfer = ready.front();
    const bool behind = std::ranges::find(refused_, transfer.other, &Transfer::other) != refused_.end();
    if (behind || refused(transfer)) {
      refused_.splice(refused_.end(), ready, ready.begin());
      continue;
    }
    const auto outcome = outcome_of(transfer.request);
    tell(transfer.other);
    if (outcome && may_try_again(*outcome)) transfer.state = Transfer::lost;
    const bool over = outcome && transfer.state != Transfer::lost;
    over ? ready.pop_front() : outgoing_.splice(outgoing_.end(), ready, ready.begin());
  }
}

// Wake the rank, as MPI has something for it.
void MpiWire::tell(Rank to) const noexcept {
  const auto peer = peers_.find(to);
  if (peer != peers_.end() && peer->second.page) peer->second.page->tell();
}

// A message that is too long for an inbox is sent as several messages, which arrive one after the other. If
// there is too little memory, none of these is sent.
void MpiWire::send(Rank to, const Message& message) {
  Header header = message.header;
  header.session = session_;
  std::span<const std::byte> body = message.body;
  Transfers parts;
  for (constexpr std::size_t most = inbox_bytes - sizeof header; body.size() > most;) {
    Header first = header;
    first.flags |= continued;
    parts.push_back({to, tag::control, Message::bytes(first, body.first(most))});
    body = body.subspan(most);
    header.before += static_cast<std::uint32_t>(most);
  }
  parts.push_back({to, tag::control, Message::bytes(header, body)});
  post(std::move(parts));
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
    // The object is available, but this process cannot read it: ask its rank to send it.
  }
  do {
    ++fetched_;
  } while (tag_is_taken(from));
  Transfers coming;
  const int its_tag = tag::first_vector + static_cast<int>(fetched_ % tags);
  coming.push_back({from, its_tag, std::vector<std::byte>(sizeof(Stamp) + bytes), object, piece, fetched_});
  Transfers asking = asking_for(coming.front());
  // Nothing from here on takes memory.
  if (peer.fetches++ == 0) peer.since = now();
  receive(coming.front());
  fetches_.splice(fetches_.end(), coming);
  post(std::move(asking));
  return Fetch::pending;
}

// Whether this rank still waits, under the next tag, for the answer to an earlier request, which may be lost.
bool MpiWire::tag_is_taken(Rank from) const {
  for (const Transfer& transfer : fetches_) {  // the oldest come first
    if (fetched_ - transfer.number < tags) break;
    if (transfer.other == from && (fetched_ - transfer.number) % tags == 0) return true;
  }
  return false;
}

MpiWire::Transfers MpiWire::asking_for(const Transfer& transfer) const {
  const Header pull{.kind = Kind::pull,
                    .flags = static_cast<std::uint8_t>(transfer.object.what),
                    .ready = transfer.piece,
                    .round = transfer.object.round,
                    .last = static_cast<Round>(transfer.tag),
                    .fingerprint = transfer.object.version,
                    .session = session_};
  Transfers out;
  out.push_back({transfer.other, tag::control, Message::bytes(pull, {})});
  return out;
}

// Vectors are copied, since their memory may be reused before MPI has sent them.
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
  Transfers piece;
  piece.push_back({from, static_cast<int>(pull.last), std::move(bytes)});
  post(std::move(piece));
}

void MpiWire::withdraw(Object::What what, Round first_valid) {
  validity_.first_valid[static_cast<std::size_t>(what)].store(first_valid);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

Source& MpiWire::memory() {
  const bool near = std::ranges::any_of(ranks_, [&](Rank rank) { return direct(rank); });
  return near ? shared_memory_ : memory_;
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

// Look at the inboxes. Returns whether any message has come.
bool MpiWire::open_inboxes(Node& node) {
  int count = 0, outcome = MPI_SUCCESS;
  if (inboxes_.empty()) return false;
  // Open MPI first checks its requests and then makes progress. So only the second check sees what has just
  // come.
  for (int look = 0; look < 2 && count <= 0; ++look) {
    outcome = MPI_Testsome(static_cast<int>(inboxes_.size()), inboxes_.data(), &count,
                           indices_.data(), statuses_.data());
  }
  // Note all messages before the node gets any of them, since the node may have too little memory for one.
  for (int i = 0; i < count; ++i) {
    const MPI_Status& status = statuses_[static_cast<std::size_t>(i)];
    Peer& peer = peers_[ranks_[static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)])]];
    int error = MPI_SUCCESS, bytes = 0;
    if (outcome != MPI_SUCCESS) MPI_Error_class(status.MPI_ERROR, &error);
    if (error == MPI_SUCCESS) {
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      peer.bytes = static_cast<std::size_t>(bytes);
      peer.link.bytes += peer.bytes;
      peer.unread = Unread::message;
    } else if (error == MPI_ERR_TRUNCATE) {
      peer.unread = Unread::too_long;
    } else if (reports_death(error)) {
      peer.unread = Unread::death;
    } else if (may_try_again(error)) {
      peer.unread = Unread::lost;
    }
    unread_ += peer.unread != Unread::nothing;
  }
  bool news = false;
  Attempts attempts;
  for (int i = 0; i < count; ++i) {
    news |= attempts.make(
        [&] { return open_inbox(static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]), node); });
  }
  attempts.end();
  return news;
}

// Hand the message in an inbox to the node, and wait for the next one. Returns whether there was a message.
bool MpiWire::open_inbox(std::size_t peer, Node& node) {
  const Rank from = ranks_[peer];
  Peer& sender = peers_[from];
  if (sender.unread == Unread::message) {
    understand(from, sender, node);
  } else if (sender.unread == Unread::too_long) {
    node.garbled(from, "too long");
  } else if (sender.unread == Unread::death) {
    for (auto next = outgoing_.begin(); next != outgoing_.end();) {
      const auto at = next++;  // MPI may never be done with it
      if (at->other == from && at->state == Transfer::pending) left_to_mpi_->splice(left_to_mpi_->end(), outgoing_, at);
    }
    node.lost(from);
  } else if (sender.unread == Unread::lost) {
    node.lost_message(from);
    sender.begun = {};
  }
  const Unread had = std::exchange(sender.unread, Unread::nothing);
  unread_ -= had != Unread::nothing;
  const bool news = had == Unread::message || had == Unread::too_long;
  if (news) receive(peer);  // otherwise nothing has come; the next poll tries again
  return news;
}

void MpiWire::understand(Rank from, Peer& peer, Node& node) {
  try {
    Message message = Message::from(std::span(peer.inbox.get(), peer.bytes));
    if (message.header.session != session_) return;
    const std::size_t before = message.header.before;
    if (peer.begun.size() != before) peer.begun = {};  // MPI has lost a part, and has reported this to one of the ranks
    if (peer.begun.size() != before) return;
    const bool more = (message.header.flags & continued) != 0;
    if (more || !peer.begun.empty()) {
      if (peer.begun.size() + message.body.size() > longest_body) throw Damaged();
      if (more) {
        peer.begun.insert(peer.begun.end(), message.body.begin(), message.body.end());
        return;
      }
      message.body.insert(message.body.begin(), peer.begun.begin(), peer.begun.end());
    }
    if (message.header.kind == Kind::pull) {
      answer(from, message.header, node);
    } else {
      node.deliver(from, message);
    }
  } catch (const Damaged&) {
    node.garbled(from, std::to_string(peer.bytes) + " bytes");
  }
  peer.begun = {};
}

// Note the outcome of messages that are on their way. Messages to one rank usually end in order, and MPI looks at the
// network for each message that is not over.
void MpiWire::complete_sends() {
  std::vector<Rank>& waiting = look_.waiting;
  waiting.clear();
  for (Transfer& transfer : outgoing_) {
    if (transfer.state != Transfer::pending) continue;
    if (std::ranges::find(waiting, transfer.other) != waiting.end()) continue;
    if (const auto outcome = outcome_of(transfer.request)) {
      const bool lost = may_try_again(*outcome);
      transfer.state = lost ? Transfer::lost : *outcome == MPI_SUCCESS ? Transfer::done : Transfer::failed;
    } else {
      waiting.push_back(transfer.other);
    }
  }
}

// Note the outcome of all pieces that are on their way. One look at the network serves all of them: a look for each
// piece would take more time than the pieces.
void MpiWire::complete_fetches() {
  auto& [requests, transfers, indices, statuses, waiting] = look_;
  requests.clear();
  transfers.clear();
  for (Transfer& transfer : fetches_) {
    if (transfer.state != Transfer::pending) continue;  // MPI had no memory for it
    requests.push_back(transfer.request);
    transfers.push_back(&transfer);
  }
  if (requests.empty()) return;
  indices.resize(requests.size());
  statuses.resize(requests.size());
  int count = 0, outcome = MPI_SUCCESS;
  for (int look = 0; look < 2 && count <= 0; ++look) {  // twice, as with inboxes
    outcome = MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count,
                           indices.data(), statuses.data());
  }
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    Transfer& transfer = *transfers[static_cast<std::size_t>(indices[at])];
    const bool well = outcome == MPI_SUCCESS || statuses[at].MPI_ERROR == MPI_SUCCESS;
    transfer.state = well ? Transfer::done : may_try_again(statuses[at].MPI_ERROR) ? Transfer::lost : Transfer::failed;
    int bytes = 0;
    if (well) MPI_Get_count(&statuses[at], MPI_BYTE, &bytes);
    transfer.received = static_cast<std::size_t>(bytes);
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Transfer& transfer = *transfers[i];
    transfer.request = requests[i];
    // If one request has failed, Open MPI frees all requests whose rank is dead. But it reports only the
    // requests whose failure it had already seen.
    if (transfer.state == Transfer::pending && transfer.request == MPI_REQUEST_NULL) {
      transfer.state = Transfer::unreported;
    }
  }
}

// Hand the node a piece, or tell it that the piece will not come. Returns whether either was done.
bool MpiWire::end_fetch(Transfer& transfer, Node& node) {
  if (transfer.state == Transfer::lost) post(asking_for(transfer));
  if (transfer.state == Transfer::lost || transfer.state == Transfer::refused) {
    receive(transfer);
    return false;
  }
  const Stamp expected{session_, transfer.object.round, transfer.object.version, transfer.piece,
                       static_cast<std::uint64_t>(transfer.object.what)};
  if (transfer.received >= sizeof(Stamp) && std::memcmp(transfer.bytes.data(), &expected, sizeof expected) != 0) {
    receive(transfer);  // an answer to an earlier rank, which has left
    return false;
  }
  std::span<const std::byte> data;  // nothing, or all that was requested
  if (transfer.received == transfer.bytes.size()) data = std::span(transfer.bytes).subspan(sizeof(Stamp));
  node.arrived(transfer.other, transfer.object, transfer.piece, data);
  Peer& peer = peers_[transfer.other];
  peer.link.bytes += transfer.received;
  if (--peer.fetches == 0) peer.link.seconds += now() - peer.since;
  return true;
}

// Remove a transfer. MPI may still use a request whose end it has not reported.
void MpiWire::remove(Transfers& from, Transfers::iterator transfer) {
  if (transfer->state == Transfer::unreported) {
    left_to_mpi_->splice(left_to_mpi_->end(), from, transfer);
  } else {
    from.erase(transfer);
  }
}

// Whether a transfer is a piece, or a request for one. Both may come twice, and in any order: the receiver
// checks the stamp.
bool MpiWire::is_of_fetch(const Transfer& transfer) {
  if (transfer.tag != tag::control) return true;
  Header header;
  std::memcpy(&header, transfer.bytes.data(), sizeof header);
  return header.kind == Kind::pull;
}

bool MpiWire::poll(Node& node, bool anyway) {
  sent_ = messages_.load();
  if (!anyway && sent_ == had_ && !hears_nothing()) return false;
  bool news = false;
  Attempts attempts;
  for (std::size_t i = 0; i < inboxes_.size(); ++i) {
    if (inboxes_[i] != MPI_REQUEST_NULL) continue;
    const bool unread = peers_[ranks_[i]].unread != Unread::nothing;
    if (!unread) receive(i);  // the inbox had an error
    if (unread) news |= attempts.make([&] { return open_inbox(i, node); });
  }
  // An inbox holds one message. All messages that were sent before the last wake-up must be seen now.
  for (int i = 0; i < most_at_once && attempts.make([&] { return open_inboxes(node); }); ++i) news = true;
  attempts.make([&] {
    complete_fetches();
    complete_sends();
    return true;
  });
  post(std::exchange(refused_, {}));
  Transfers ended, again;
  for (auto next = outgoing_.begin(); next != outgoing_.end();) {
    const auto at = next++;
    if (at->state == Transfer::pending) {
      tell(at->other);  // MPI sends a long message in parts
    } else if (at->state == Transfer::lost && is_of_fetch(*at)) {
      at->state = Transfer::pending;
      again.splice(again.end(), outgoing_, at);
    } else {
      ended.splice(ended.end(), outgoing_, at);
    }
  }
  post(std::move(again));
  // Told of a loss, the node sends messages. If MPI loses them at once, the next poll tells the node.
  for (auto next = ended.begin(); next != ended.end();) {
    const auto at = next++;
    const auto note = [&] { return at->state == Transfer::lost ? node.lost_message(at->other), true : true; };
    if (attempts.make(note)) remove(ended, at);
  }
  outgoing_.splice(outgoing_.begin(), ended);  // those of which the node could not be told, for lack of memory
  // A piece that has come may make the node request more pieces, which go to the end of the list.
  for (auto next = fetches_.begin(); next != fetches_.end();) {
    const auto at = next++;
    if (at->state == Transfer::pending) continue;
    if (!attempts.make([&] { return end_fetch(*at, node); })) continue;
    remove(fetches_, at);
    news = true;
  }
  attempts.end();
  return news;
}

}  // namespace jaxcoded
