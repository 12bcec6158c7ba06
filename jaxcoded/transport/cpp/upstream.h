// The ranks above: which of them this rank asks for results, and which have not answered.
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

// The parent is asked first, and again as soon as it sends something. A rank that does not answer is not asked
// twice, so that messages do not pile up at a frozen or dead rank.
class Upstream {
 public:
  explicit Upstream(const std::vector<Rank>& above) : above_(above) {}

  // Record that a rank has sent something. A rank that only `asks` whether this rank is there is alive, but
  // may not have the result that this rank waits for.
  void heard(Rank rank, bool asks, double now) {
    if (const auto asked = asked_.find(rank); asked != asked_.end()) {
      const double took = now - asked->second.at;
      if (took < longest_answer && took >= answer_seconds(now)) answer_ = {took, now};
      asked_.erase(asked);
      forsaken_seconds_ = 0;  // even if this rank asks it again before `forsaken` is called
    }
    if (above_.empty()) return;
    if (rank == source() && !asks) heard_at_ = now;
    if (rank == parent()) {
      unanswered_ = told_step_times_ = false;
      for (auto& [kind, alert] : alerts_) alert.sent = 0;
      if (std::exchange(source_, 0)) wanted_ = 0;  // a rank further up was asked for the wanted results
    }
  }
  // Record that a rank is dead and will not answer.
  void lost(Rank rank) {
    dead_.insert(rank);
  }
  bool dead(Rank rank) const { return dead_.contains(rank); }
  bool rootless() const { return !above_.empty() && dead(above_.back()); }
  bool all_dead() const { return std::ranges::all_of(above_, [&](Rank rank) { return dead(rank); }); }
  // Record that MPI has lost a message to or from a living rank. The lost message may have been a question, an
  // offer or an answer, so the rank may be asked again. Until it sends something, it still counts as silent.
  void lost_message(Rank rank) {
    if (const auto asked = asked_.find(rank); asked != asked_.end()) asked->second.in_vain = true;
    if (above_.empty() || rank != parent()) return;
    unanswered_ = told_step_times_ = false;
    for (auto& [kind, alert] : alerts_) alert.sent = 0;
  }
  // Record that some of the result came, or that this rank calls. The wait for the source begins again.
  void moved(double now) { heard_at_ = stuck_since_ = now; }
  // Record that a wait for a result begins. The time since the source last sent something still counts.
  void waits(double now) { stuck_since_ = now; }

  Rank parent() const { return above_.front(); }
  // Return the calls whose words the parent knows.
  Signatures::Known& introduced() { return introduced_; }
  // The source: the rank from which this rank expects results.
  Rank source() const { return above_[source_]; }
  // Return when the source fell silent: since then it has sent only questions, and no part of the result came.
  double silent_since() const { return heard_at_; }
  double stuck_since() const { return stuck_since_; }
  // Return how many seconds the slowest of the latest answers took. An answer may wait behind long earlier
  // messages.
  double answer_seconds(double now) const { return now - answer_.at < remembered ? answer_.took : 0; }

  // Record an offer to the parent in a round: the round's first offer, or one of `more`. An offer also asks for
  // the round's result, in place of earlier questions.
  void offered(Round round, bool more) {
    unanswered_ |= !more;
    wanted_ = round;
  }
  // Whether the parent was offered something and has been silent since.
  bool unanswered() const { return unanswered_; }
  // Whether the parent may get step times, to which it need not answer: it has sent something since it last got
  // step times or an offer.
  bool tell_step_times() { return !unanswered_ && !std::exchange(told_step_times_, true); }
  // Keep an alert for the parent. Until the parent sends something, it gets only a few alerts of each kind. Of
  // the alerts that must wait, only the latest round's alert is kept.
  void alert(Message message) {
    auto& waiting = alerts_[message.header.flags].waiting;
    if (!waiting || waiting->header.round < message.header.round) waiting = std::move(message);
  }
  // Send the alerts that the parent may get now. Keep an alert for which `send` has too little memory.
  void send_alerts(const std::function<void(const Message&)>& send) {
    for (auto& [kind, alert] : alerts_) {
      if (!alert.waiting || alert.sent == most_alerts) continue;
      send(*alert.waiting);
      ++alert.sent;
      alert.waiting.reset();
    }
  }

  // Record that a rank was asked for the results of the rounds from `frontier` to `last`.
  void asked(Rank rank, Round frontier, Round last, double now) {
    source_ = static_cast<std::size_t>(std::ranges::find(above_, rank) - above_.begin());
    asked_.try_emplace(rank, now).first->second.in_vain = false;
    asked_for_ = frontier;
    wanted_ = last;
    heard_at_ = now;
  }
  Round wanted() const { return wanted_; }  // the newest round asked for
  // Whether the source is a rank above the parent that was not asked for the result of this rank's call yet,
  // and may be asked. An offer also asks for the result, but only the parent gets offers.
  bool stand_in_unasked(Round frontier) const {
    return source_ > 0 && asked_for_ < frontier && !silent(source());
  }
  // Whether a rank may be asked: it has answered all questions, and it may have the result.
  bool may_ask(Rank rank) const { return !silent(rank) && !gone_from_.contains(rank); }
  // Return the nearest rank that may be asked. The parent may be asked only if it has answered the last offer. If
  // all have been asked, return a rank to which a question may have been lost.
  std::optional<Rank> next() const {
    for (const Rank rank : above_) {
      if (may_ask(rank) && !(unanswered_ && rank == parent())) return rank;
    }
    for (const auto& [rank, asked] : asked_) {
      if (asked.in_vain && !dead(rank) && !gone_from_.contains(rank)) return rank;
    }
    return std::nullopt;
  }

  // Record that a rank no longer has the result at the frontier, but only results from round `oldest` on.
  void gone(Rank rank, Round oldest) {
    gone_from_.insert(rank);
    oldest_ = std::max(oldest, oldest_);
  }
  // Whether to use a result from a rank at this height: if the source is not nearer, or no longer has it.
  bool may_use(std::size_t height) const { return height <= source_ || gone_from_.contains(source()); }
  bool gone_from(Rank rank) const { return gone_from_.contains(rank); }
  bool gone_somewhere() const { return !gone_from_.empty(); }
  bool gone_everywhere() const { return gone_from_.size() == above_.size(); }
  Round oldest() const { return oldest_; }  // the first result that the ranks in `gone_from_` still have
  // Record that the result at the frontier has arrived. Any rank above may have the next result.
  void advanced() { gone_from_.clear(); }
  // Forget the questions asked so far: this rank continues at another round.
  void restart() {
    gone_from_.clear();
    wanted_ = asked_for_ = oldest_ = 0;
  }

  // Return how many seconds this rank, or a rank below, has waited although all ranks above were asked. Return
  // nothing if no rank waits, or a rank above has answered. Call this often.
  std::optional<double> forsaken(bool waits, double now) {
    const double step = std::min(now - std::exchange(watched_at_, now), longest_step);
    if (!waits || !std::ranges::all_of(above_, [&](Rank rank) { return silent(rank); })) {
      forsaken_seconds_ = 0;
      return std::nullopt;
    }
    return forsaken_seconds_ += step;
  }

 private:
  // The time for which this process was stopped must not count as silence of other ranks.
  static constexpr double longest_step = 0.25;
  static constexpr double longest_answer = 0.25;  // a rank that took longer was usually stopped
  static constexpr double remembered = 10;  // seconds
  static constexpr int most_alerts = 4;

  bool silent(Rank rank) const { return asked_.contains(rank) || dead(rank); }

  const std::vector<Rank>& above_;  // the parent first, the root last
  std::size_t source_ = 0;          // the source's index in `above_`
  double heard_at_ = 0;             // when the source sent something or was asked, or something came
  double stuck_since_ = 0;
  struct Asked {
    double at;             // when the rank was first asked
    bool in_vain = false;  // the question may have been lost
  };
  std::map<Rank, Asked> asked_;  // ranks that were asked and have been silent since
  std::set<Rank> dead_;
  struct {
    double took = 0, at = 0;
  } answer_;
  Signatures::Known introduced_;
  bool unanswered_ = false;
  bool told_step_times_ = false;  // whether the parent got step times since it last sent something
  struct Alert {
    int sent = 0;  // alerts sent to the parent since it last sent something
    std::optional<Message> waiting = {};
  };
  std::map<std::uint8_t, Alert> alerts_;  // by the flags of the messages
  Round wanted_ = 0;
  Round asked_for_ = 0;  // the frontier when this rank last asked

  std::set<Rank> gone_from_;
  Round oldest_ = 0;

  double forsaken_seconds_ = 0;
  double watched_at_ = 0;
};

}  // namespace jaxcoded
