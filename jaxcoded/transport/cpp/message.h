// The messages between ranks. Vectors follow on request, see `Wire::fetch`.
#pragma once

#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layout.h"

namespace jaxcoded {

using Rank = int;
using Round = std::uint64_t;  // the first round is 1
// At one microsecond each, this many rounds take nine years. A message about a later round is damaged.
constexpr Round most_rounds = Round{1} << 48;

enum class Kind : std::uint8_t {
  // Up the tree.
  offer,       // `ready` pieces of my message of `round` are available; tell me its result
  want,        // tell me the results of rounds `round` … `last`. If `fingerprint` is not 0: also of the rounds
               // from `fingerprint` on, which failed only at me
  want_state,  // tell me your newest snapshot
  alert,       // a fault, in words; for example, the calls of some ranks do not match
  bye,         // I and all ranks below me have left; the body: ranks that were given up
  // Down the tree.
  result,  // `ready` pieces of the result of `round` are available; sections with the version `done` formed it
  note,    // round `last` is decided
  gone,    // I no longer have the result of `round`
  state,   // my snapshot of `round` is available; round 0: I have none
  // Other messages.
  signature,  // the call with this fingerprint, in words
  pull,   // send me piece `ready` of an object in a message with tag `last` (wires only)
  step_times,  // up: a `StepTime` of me and of each rank below me
  ask,    // down: are you there?
  here,   // up: yes, I am there
  order,  // down: what to compute of `round`, an `Order`
  will_ask,  // up: from `round` on, I ask before I begin with my own blocks
  // For a sum that is formed in sections.
  delegate,  // down: which rank forms which section of `round`, a `SectionPlan`
  formed,    // to all: pieces before `ready` of section `last` are available; `failed`: a message for it is not
};

enum Flag : std::uint8_t {
  inlined = 1,  // the body ends with the vectors themselves
  failed = 2,   // the round failed; the body is the text of its error
  relays = 4,   // in bye: I offer nothing more, but ranks below still need me
  calls = 16,   // in a `want`: the sender waits for the round in a call; in a `here`: the sender waits in a call
  shares = 16,  // in an offer: the body begins with the sender's `Progress`
  closed = 8,   // in an alert: it only counts if the root has closed the group
  undated = 2,  // in an alert: the fault belongs to no round, so some undecided round fails
  if_stuck = 4,  // in an alert: it only counts if the round that is undecided now stays undecided
  approximate = 32,  // in an offer: the pieces that earlier offers did not contain are not exact
  not_finite = 16,  // in an alert: it names ranks whose messages have NaN or infinities and are summed nevertheless
  overdue = 64,      // in an alert: it names ranks that the sender waits for after its deadline
  continued = 128,   // the body continues in the sender's next message (wires only)
  ended = 16,         // in bye: my offers are no longer available
  lost = 1,           // in a note: MPI has lost a message to the sender, which may have asked for a piece
  alone = 32,         // in a result: the round failed because the root does not answer
};

struct Header {
  Kind kind;
  std::uint8_t flags = 0;
  std::uint32_t segments = 0;
  std::uint32_t ready = 0;
  std::uint32_t before = 0;  // bytes of the body that earlier messages have brought (wires only)
  Round round = 0;
  Round last = 0;
  Round done = 0;  // up: the first round whose result the sender or a rank below it still lacks; in a result see there
  std::uint64_t fingerprint = 0;
  std::uint64_t session = 0;  // of the group; set and checked by wires
};

// Thrown if a message cannot be what its sender meant to send.
struct Damaged {};

struct Message {
  Header header;
  std::vector<std::byte> body = {};

  void append(const void* data, std::size_t bytes) {
    const std::size_t before = body.size();
    body.resize(before + bytes);
    if (bytes) std::memcpy(body.data() + before, data, bytes);
  }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(body.data()), body.size()};
  }
  template <class T>
  std::vector<T> values(std::size_t offset, std::size_t count) const {
    if (offset > body.size() || count > (body.size() - offset) / sizeof(T)) throw Damaged();
    std::vector<T> out(count);
    if (count) std::memcpy(out.data(), body.data() + offset, count * sizeof(T));
    return out;
  }
  // Return the values of a body that contains nothing else.
  template <class T>
  std::vector<T> all() const {
    if (body.size() % sizeof(T)) throw Damaged();
    return values<T>(0, body.size() / sizeof(T));
  }

  static std::vector<std::byte> bytes(const Header& header, std::span<const std::byte> body) {
    std::vector<std::byte> out(sizeof header + body.size());
    std::memcpy(out.data(), &header, sizeof header);
    if (!body.empty()) std::memcpy(out.data() + sizeof header, body.data(), body.size());
    return out;
  }
  static Message from(std::span<const std::byte> bytes) {
    if (bytes.size() < sizeof(Header)) throw Damaged();
    Message out{};
    std::memcpy(&out.header, bytes.data(), sizeof out.header);
    out.body.assign(bytes.begin() + sizeof out.header, bytes.end());
    return out;
  }
};

// An object that other ranks can fetch, piece by piece.
struct Object {
  enum class What : std::uint8_t {
    message,
    result,
    state,
    section,
    own,  // a parent's own vector in a sum that other ranks form
  } what;
  static constexpr std::size_t kinds = 5;
  Round round;  // for a state, a number that the rank with the state counts
  std::uint64_t version = 0;  // of a message or own vector with shared work, and of a section

  bool operator==(const Object&) const = default;
  auto operator<=>(const Object&) const = default;
};

}  // namespace jaxcoded
