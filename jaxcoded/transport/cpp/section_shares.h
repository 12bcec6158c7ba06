// Determines how much of a sum each rank forms, and from which messages.
//
// Both choices determine the traffic of a rank's network port: the rank's message goes to all ranks that form
// sections from it, and its own section goes to every rank. A round takes as long as the busiest port. So each
// piece in turn goes to the rank with which the busiest port stays least busy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

namespace jaxcoded {

// A message that is a term of the sum: the port that sends it, and its length in lengths of the sum.
struct PortMessage {
  std::size_t port = 0;
  double length = 1;
};

// A number of neighbouring pieces, the maker that forms them, and the choice of messages that it adds up.
struct SectionShare {
  std::size_t maker = 0, choice = 0;  // by index
  std::uint32_t pieces = 0;
};

struct SectionShares {
  std::vector<SectionShare> shares = {};
  double busiest = 0;  // what the busiest port sends or fetches, in lengths of the sum
};

// What the busiest port would move if this many makers could share the sum evenly. Each message goes to all
// makers, and every maker gets the whole sum. `messages`: their total length, in lengths of the sum.
inline double evenly_shared(double messages, std::size_t makers) {
  return (messages + static_cast<double>(makers) - 1) / static_cast<double>(makers);
}

// `makers`: the ports of the ranks that are present and may form pieces. `choices`: sets of messages, each of
// which suffices, with one message for each port in the set. `taker`: the port that gets the whole sum; without
// a `taker`, all makers get the whole sum.
inline SectionShares section_shares(std::span<const std::size_t> makers,
                                    std::span<const std::vector<PortMessage>> choices,
                                    std::size_t ports, std::uint32_t pieces,
                                    std::optional<std::size_t> taker = {}) {
  constexpr std::size_t units_of_each = 16;  // finer units do not help
  const std::size_t units = std::min<std::size_t>(pieces, makers.size() * units_of_each);
  const auto takes = [&](std::size_t port) { return !taker || port == *taker ? 1.0 : 0.0; };
  const double takers = taker ? 1 : static_cast<double>(makers.size());
  // What each port would move. Units that are not assigned yet count as if they used all choices equally often.
  // If they did not count, a rank whose message is in every choice would get too many units at first.
  std::vector<double> turns(ports), sends(ports), fetches(ports);
  for (const auto& choice : choices) {
    for (const PortMessage& message : choice) {
      turns[message.port] += message.length / static_cast<double>(choices.size());
    }
  }
  for (std::size_t port = 0; port < ports; ++port) sends[port] = static_cast<double>(units) * turns[port];
  for (const std::size_t port : makers) fetches[port] = static_cast<double>(units) * takes(port);

  // If a choice contains the maker's own message, this message does not move.
  std::vector<std::vector<double>> own(choices.size(), std::vector<double>(ports));
  std::vector<double> lengths(choices.size());
  for (std::size_t c = 0; c < choices.size(); ++c) {
    for (const PortMessage& message : choices[c]) {
      own[c][message.port] = message.length;
      lengths[c] += message.length;
    }
  }
  // For a choice: the port that would send most, what it would send, and what the second one would send.
  struct Most {
    std::size_t port = 0;
    double first = -2, second = -2;
  };
  std::vector<Most> most(choices.size());
  const auto look = [&](std::size_t c) {
    most[c] = {};
    for (const PortMessage& message : choices[c]) {
      const double load = sends[message.port] - turns[message.port] + message.length;
      if (load > most[c].first) {
        most[c] = {.port = message.port, .first = load, .second = most[c].first};
      } else {
        most[c].second = std::max(most[c].second, load);
      }
    }
  };
  for (std::size_t c = 0; c < choices.size(); ++c) look(c);
  // The cost of one more unit: what the busiest port involved would move, then what the unit would move.
  const auto cost = [&](std::size_t m, std::size_t c) {
    const std::size_t port = makers[m];
    const double terms = lengths[c] - own[c][port];
    const double others = most[c].port == port ? most[c].second : most[c].first;
    const double busiest = std::max(
        {sends[port] - turns[port] + takers - takes(port), fetches[port] + terms - takes(port), others});
    return std::tuple(busiest, terms, sends[port] + fetches[port]);
  };

  std::vector<std::vector<std::size_t>> given(makers.size(), std::vector<std::size_t>(choices.size()));
  for (std::size_t unit = 0; unit < units; ++unit) {
    std::size_t maker = 0, choice = 0;
    auto least = cost(0, 0);
    for (std::size_t m = 0; m < makers.size(); ++m) {
      for (std::size_t c = 0; c < choices.size(); ++c) {
        if (const auto candidate = cost(m, c); candidate < least) {
          least = candidate;
          maker = m;
          choice = c;
        }
      }
    }
    ++given[maker][choice];
    const std::size_t port = makers[maker];
    for (std::size_t sender = 0; sender < ports; ++sender) sends[sender] -= turns[sender];
    for (const PortMessage& other : choices[choice]) sends[other.port] += other.length;
    fetches[port] += lengths[choice] - own[choice][port] - takes(port);
    sends[port] += takers - takes(port) - own[choice][port];
    for (std::size_t c = 0; c < choices.size(); ++c) look(c);
  }

  SectionShares out;
  std::size_t before = 0;
  const auto bound = [&](std::size_t unit) {
    return static_cast<std::uint32_t>(std::uint64_t{pieces} * unit / units);
  };
  for (std::size_t m = 0; m < makers.size(); ++m) {
    for (std::size_t c = 0; c < choices.size(); ++c) {
      if (!given[m][c]) continue;
      const std::size_t until = before + given[m][c];
      out.shares.push_back({.maker = m, .choice = c, .pieces = bound(until) - bound(before)});
      before = until;
    }
  }
  for (std::size_t port = 0; port < ports; ++port) {
    out.busiest = std::max({out.busiest, sends[port] / static_cast<double>(units),
                            fetches[port] / static_cast<double>(units)});
  }
  return out;
}

}  // namespace jaxcoded
