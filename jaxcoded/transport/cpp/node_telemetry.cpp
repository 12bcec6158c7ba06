// What a node remembers of its rounds, and what it reports.
#include "node.h"

#include <algorithm>
#include <utility>

namespace jaxcoded {
namespace {

constexpr Round latest = 31;  // how many rounds a step time covers

}  // namespace

void Node::sum_complete() {
  up_.complete = true;
  telemetry_.decided(next_, wire_.now(), family_.rank, columns_,
                     up_.approximating || lacks_blocks());
}

// Record how many blocks each rank computed in a round, in the order of the telemetry's columns.
void Node::remember_division() {
  const std::vector<Computed> by_member = work_.ledger->computed();
  std::vector<Computed> out(by_member.size());
  out[0] = by_member[0];
  for (std::size_t i = 0; i < children_.size(); ++i) out[children_[i].column + 1] = by_member[i + 1];
  telemetry_.divided(next_, out);
}

// Return the cost of this rank's own blocks, as a multiple of the cost of the blocks that it has computed; 0 if it
// has computed none.
double Node::own_of_computed() const {
  if (!up_.blocks) return 0;
  if (up_.call.costs.empty()) return static_cast<double>(work_.owned) / up_.cost;
  double own = 0;
  for (Block block = 0; block < work_.holders.size(); ++block) {
    if (work_.holders[block].front() == family_.rank) own += cost_of(block);
  }
  return own / up_.cost;
}

// Return the median seconds between calls that this rank took part in; `unknown` without such calls. With
// shared work, count as if this rank had computed just its own blocks, at the pace of its computed blocks.
double Node::own_work() const {
  std::vector<double> works;
  const Round first = next_ > latest ? next_ - latest : 1;
  for (Round round = first; round < next_; ++round) {
    const RoundRecord* record = telemetry_.find(round);
    const RoundRecord* before = telemetry_.find(round - 1);
    if (before && before->loop) continue;  // the loop and its sum are one step
    if (!record || record->skipped || !(record->work >= 0)) continue;
    double work = record->work;
    if (record->shared) {
      if (!record->own) continue;
      work += record->busy * record->own;
    }
    works.push_back(work);
  }
  if (works.empty()) return unknown;
  return median(works);
}

std::vector<StepTime> Node::step_times() const {
  std::vector<StepTime> out{{.rank = family_.rank, .work = own_work()}};
  const RoundRecord* last = next_ > 1 ? telemetry_.find(next_ - 1) : nullptr;
  for (const auto& [rank, step_time] : step_times_) {
    out.push_back(step_time);
    for (const Child& child : children_) {
      if (child.rank != rank || !last || child.offer.round >= last->round) continue;
      out.back().silent = std::max(last->ended - child.heard, 0.0);
    }
  }
  return out;
}

void Node::on_step_times(Rank from, const Message& message) {
  if (!child_of(from)) return;
  for (const StepTime& step_time : message.all<StepTime>()) {
    const auto rank = static_cast<Rank>(step_time.rank);
    if (listeners_.contains(rank)) step_times_[rank] = step_time;
  }
}

void Node::tell_step_times() {
  if (!telemetry_.on() || root() || !upstream_.tell_step_times()) return;
  told_step_times_ = wire_.now();
  const std::vector<StepTime> all = step_times();
  constexpr std::size_t most = 1024;  // step times in a message
  for (std::size_t first = 0; first < all.size(); first += most) {
    Message message{header(Kind::step_times, 0)};
    message.append(all.data() + first, std::min(most, all.size() - first) * sizeof(StepTime));
    wire_.send(family_.ancestors.front(), message);
  }
}

}  // namespace jaxcoded
