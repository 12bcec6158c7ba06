// The ranks above: which of them this one asks for results, and who has not answered.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "message.h"
#include "signatures.h"

namespace jaxcoded {

// The parent is asked first, and again as soon as it sends something. A rank that does not answer is
// not asked twice, so that nothing piles up in front of one that is frozen or dead.
class Upstream {
 public:
  explicit Upstream(const std::vector<Rank>& above) : above_(above) {}

  // A rank has sent something. Where it only asks whether this one is there, it lives, but nobody
  // knows whether it has what this one waits for.
  void heard(Rank rank, bool asks, double now) {
    if (const auto asked = asked_.find(rank); asked != asked_.end()) {
      const double took = now - asked->second;
      if (took < longest_answer && took >= answer_seconds(now)) answer_ = {took, now};
      asked_.erase(asked);
    }
    if (above_.empty()) return;
    if (rank == source() && !asks) heard_at_ = now;
    if (rank == parent()) {
      unanswered_ = false;
      for (auto& [kind, alert] : alerts_) alert.told = 0;
      if (std::exchange(source_, 0)) wanted_ = 0;  // was asked for elsewhere
    }
  }
  // It is dead, and will not answer.
  void lost(Rank rank) {
    dead_.insert(rank);
  }
  bool dead(Rank rank) const { return dead_.contains(rank); }
  bool rootless() const { return !above_.empty() && dead(above_.back()); }
  // Something of the result came, or this rank calls: whoever is asked gets all of its time.
  void moved(double now) { heard_at_ = stuck_since_ = now; }
  // A result is waited for from now on, although whoever is asked may have had some of its time.
  void waits(double now) { stuck_since_ = now; }

  Rank parent() const { return above_.front(); }
  // The calls that it knows.
  Signatures::Known& introduced() { return introduced_; }
  // Who is relied on.
  Rank source() const { return above_[source_]; }
  // For how long it has said nothing but questions, and nothing has come.
  double silent_since() const { return heard_at_; }
  double stuck_since() const { return stuck_since_; }
  // What the slowest of the latest answers took: a word may wait for much that was sent before it.
  double answer_seconds(double now) const { return now - answer_.at < remembered ? answer_.took : 0; }

  // The parent was told that this rank has something of a round, or more of it. That asks for the
  // result, and takes the place of what was asked for before.
  void offered(Round round, bool more) {
    unanswered_ |= !more;
    wanted_ = round;
  }
  // Whether the parent was offered something and has said nothing since.
  bool unanswered() const { return unanswered_; }
  // The parent is to hear what is wrong: of each kind a few times until it says something, and then of the latest round.
  void alert(Message message) {
    auto& waiting = alerts_[message.header.flags].waiting;
    if (!waiting || waiting->header.round < message.header.round) waiting = std::move(message);
  }
  // Send what it may hear now. What `send` has no memory for still waits.
  void send_alerts(const std::function<void(const Message&)>& send) {
    for (auto& [kind, alert] : alerts_) {
      if (!alert.waiting || alert.told == most_alerts) continue;
      send(*alert.waiting);
      ++alert.told;
      alert.waiting.reset();
    }
  }

  // A rank was asked for the results from the frontier up to that of `last`.
  void asked(Rank rank, Round frontier, Round last, double now) {
    source_ = static_cast<std::size_t>(std::ranges::find(above_, rank) - above_.begin());
    asked_.try_emplace(rank, now);
    asked_for_ = frontier;
    wanted_ = last;
    heard_at_ = now;
  }
  Round wanted() const { return wanted_; }  // the newest round asked for
  // Whether a rank other than the parent was asked for nothing yet that this rank calls, and may
  // be. An offer asks for its result too, but it is made to the parent alone.
  bool stand_in_unasked(Round frontier) const {
    return source_ > 0 && asked_for_ < frontier && !silent(source());
  }
  // It may be asked: it has answered what it was asked before, and it may have the result.
  bool may_ask(Rank rank) const { return !silent(rank) && !gone_from_.contains(rank); }
  // The nearest one that may be asked, the parent only if it has answered what it was offered.
  std::optional<Rank> next() const {
    for (const Rank rank : above_) {
      if (may_ask(rank) && !(unanswered_ && rank == parent())) return rank;
    }
    return std::nullopt;
  }

  // A rank no longer has the result at the frontier, but those from `oldest` on.
  void gone(Rank rank, Round oldest) {
    gone_from_.insert(rank);
    oldest_ = std::max(oldest, oldest_);
  }
  // Whether a result of a rank so far up is of use: nobody nearer is relied on that may have it.
  bool may_use(std::size_t height) const { return height <= source_ || gone_from_.contains(source()); }
  bool gone_somewhere() const { return !gone_from_.empty(); }
  bool gone_everywhere() const { return gone_from_.size() == above_.size(); }
  Round oldest() const { return oldest_; }  // the first that those have
  // The result at the frontier is here: the next one may be anywhere.
  void advanced() { gone_from_.clear(); }
  // This rank goes on at another round.
  void restart() {
    gone_from_.clear();
    wanted_ = asked_for_ = oldest_ = 0;
  }

  // For how many seconds all above were asked and none has answered, while this rank or one below
  // waits; none if none does, or one has. To be called often.
  std::optional<double> forsaken(bool waits, double now) {
    const double step = std::min(now - std::exchange(watched_at_, now), longest_step);
    if (!waits || !std::ranges::all_of(above_, [&](Rank rank) { return silent(rank); })) {
      forsaken_seconds_ = 0;
      return std::nullopt;
    }
    return forsaken_seconds_ += step;
  }

 private:
  // A process may be stopped itself, and is not to take that time for the silence of others.
  static constexpr double longest_step = 0.25;
  static constexpr double longest_answer = 0.25;  // who took longer was stopped, as a rule
  static constexpr double remembered = 10;  // seconds
  static constexpr int most_alerts = 4;

  bool silent(Rank rank) const { return asked_.contains(rank) || dead(rank); }

  const std::vector<Rank>& above_;  // the parent first, the root last
  std::size_t source_ = 0;          // in it
  double heard_at_ = 0;             // of the source, or when it was asked, or something came
  double stuck_since_ = 0;
  std::map<Rank, double> asked_;  // when, who has said nothing since
  std::set<Rank> dead_;
  struct {
    double took = 0, at = 0;
  } answer_;
  Signatures::Known introduced_;
  bool unanswered_ = false;
  struct Alert {
    int told = 0;  // so many, since when nothing was heard
    std::optional<Message> waiting = {};
  };
  std::map<std::uint8_t, Alert> alerts_;  // by flags
  Round wanted_ = 0;
  Round asked_for_ = 0;  // the frontier when something was asked for last

  std::set<Rank> gone_from_;
  Round oldest_ = 0;

  double forsaken_seconds_ = 0;
  double watched_at_ = 0;
};

}  // namespace jaxcoded
