// The wire of a group: MPI for messages, and for vectors between hosts. On one host a receiver copies
// vectors out of the other process's memory.
#pragma once

#include <mpi.h>

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "attempts.h"
#include "node.h"
#include "page.h"

namespace jaxcoded {

// The tags of a group's own communicator.
namespace tag {
constexpr int end = 0, question = 2, answer = 3, go_on = 4;  // see `EndOfJob`
constexpr int control = 1;                                   // for messages
constexpr int first_vector = 5, last_vector = 32767;         // every MPI allows tags up to this one
}  // namespace tag

// Whether MPI continues when a rank dies, and reports the death (ULFM).
bool fault_tolerant();

// Return MPI's code of success or error if MPI is done with a request, which becomes null; otherwise nothing.
//
// A pending send must not be freed: if it then fails, as the other rank dies, Open MPI ends this process (MPI 4.1,
// section 3.7.3). `MPI_Test` frees pending sends to dead ranks, so it is only called for requests that are over.
std::optional<int> outcome_of(MPI_Request& request) noexcept;

// The traffic from one other rank to this rank.
struct Link {
  std::uint64_t bytes = 0;  // of messages of all kinds
  double seconds = 0;       // in which vectors were on their way
};

class MpiWire : public Wire {
 public:
  // `comm` belongs to the wire and is never freed: messages to a rank that has left may still be on their way,
  // and MPI would deliver them in a later communicator. `cards`: the cards of all ranks of `comm`. `peers`: the
  // ranks that this rank ever exchanges messages with.
  MpiWire(MPI_Comm comm, std::uint64_t session, const std::vector<Rank>& peers,
          const std::vector<Card>& cards, Validity& validity,
          const std::atomic<std::uint32_t>& messages, Source& shared_memory, Source& memory);
  ~MpiWire() override;

  void send(Rank to, const Message& message) override;
  Fetch fetch(Rank from, Object object, std::uint32_t piece, std::uint64_t address, std::byte* to,
              std::size_t bytes, Copy how) override;
  void withdraw(Object::What what, Round first_valid) override;
  Source& memory() override;
  std::size_t inline_bytes(Rank to) const override;
  bool direct(Rank from) const override;
  double now() const override;

  // Hand new messages to the node. Returns whether there were any. An MPI that finds nothing may yield the
  // core. So MPI is asked only if more messages were sent than the node has, or if `anyway`. A message for
  // which the node has too little memory stays in the wire until the next call, and this call throws
  // `std::bad_alloc`.
  bool poll(Node& node, bool anyway);
  // Record that the node has all messages sent so far, since the latest polls of all groups have found nothing.
  void has_all() { had_ = sent_; }
  // Whether something may happen without a wake-up.
  bool hears_nothing() const { return awaits() || !outgoing_.empty(); }
  // Like `hears_nothing`, but sends in progress do not count: a send to a stopped rank does not end.
  bool awaits() const { return silent_peers_ || unread_ > 0 || !fetches_.empty() || !refused_.empty(); }
  // Whether all messages have been sent.
  bool sent() const { return outgoing_.empty() && refused_.empty(); }
  std::map<Rank, Link> links() const;

 private:
  // What an inbox contains that has not reached the node.
  enum class Unread : std::uint8_t { nothing, message, too_long, lost, death };
  struct Peer {
    std::unique_ptr<PeerPage> page;
    std::unique_ptr<std::byte[]> inbox;
    Unread unread = Unread::nothing;
    std::size_t bytes = 0;  // of the message in the inbox
    std::vector<std::byte> begun = {};  // the beginning of a body whose rest follows
    Link link = {};
    std::size_t fetches = 0;  // fetches in progress
    double since = 0;         // since when fetches have been in progress without a break
  };
  // A message or a piece on its way. A transfer is kept until its outcome is known and the node has the message
  // or piece.
  struct Transfer {
    Rank other;
    int tag;
    std::vector<std::byte> bytes;
    Object object = {};  // of a piece
    std::uint32_t piece = 0;
    std::uint64_t number = 0;  // of the fetch
    MPI_Request request = MPI_REQUEST_NULL;
    // refused: MPI did not take the transfer. lost: what was on its way cannot be used. In both cases the other
    // rank lives, so a refused message or a lost fetch is tried again. A lost message is reported to the node
    // instead, as later messages may have arrived after it.
    enum { pending, done, failed, unreported, refused, lost } state = pending;
    std::size_t received = 0;  // bytes
  };
  // A list, since moving an element from one list to another takes no memory.
  using Transfers = std::list<Transfer>;
  // Buffers for checking transfers. They are kept, since every poll needs them.
  struct Look {
    std::vector<MPI_Request> requests = {};
    std::vector<Transfer*> transfers = {};
    std::vector<int> indices = {};
    std::vector<MPI_Status> statuses = {};
    std::vector<Rank> waiting = {};  // ranks to which a message is on its way
  };

  bool open_inboxes(Node& node);
  bool open_inbox(std::size_t peer, Node& node);
  void understand(Rank from, Peer& peer, Node& node);
  void receive(std::size_t peer);
  void complete_sends();
  void complete_fetches();
  bool end_fetch(Transfer& transfer, Node& node);
  static bool is_of_fetch(const Transfer& transfer);
  void remove(Transfers& from, Transfers::iterator transfer);
  void post(Transfers ready) noexcept;
  bool refused(Transfer& transfer) noexcept;
  bool tag_is_taken(Rank from) const;
  Transfers asking_for(const Transfer& piece) const;
  void tell(Rank to) const noexcept;
  void answer(Rank from, const Header& pull, const Node& node);
  void receive(Transfer& transfer) noexcept;

  MPI_Comm comm_;
  std::uint64_t session_;
  Validity& validity_;
  Source& shared_memory_;
  Source& memory_;
  const std::atomic<std::uint32_t>& messages_;  // how many messages peers with pages have sent
  std::uint32_t sent_ = 0;                       // the value of `messages_` when MPI was last asked
  std::optional<std::uint32_t> had_ = {};        // the value when MPI last had no more messages
  std::map<Rank, Peer> peers_;
  std::vector<Rank> ranks_;               // the sender for each inbox
  std::vector<MPI_Request> inboxes_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::size_t unread_ = 0;  // inboxes with something unread
  Transfers outgoing_, fetches_;
  Transfers refused_;  // messages that MPI did not take, and later messages to the same ranks
  // MPI may still read from these transfers, or write to them.
  std::unique_ptr<Transfers> left_to_mpi_ = std::make_unique<Transfers>();
  Look look_;
  std::uint64_t fetched_;  // how many pieces were requested; begins anywhere
  bool silent_peers_ = false;
};

}  // namespace jaxcoded
