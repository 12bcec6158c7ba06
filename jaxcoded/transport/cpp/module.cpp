// The engine's interface for Python.
#include <mpi.h>
#include <nanobind/ndarray.h>

#include <cmath>
#include <numeric>
#include <tuple>

#include "engine.h"
#include "module.h"
#include "reports.h"
#include "staging.h"
#include "without_gil.h"
#include "xla.h"

namespace jaxcoded {
namespace {

using PromiseTuple = std::tuple<std::size_t, std::size_t, std::size_t>;

// Return a decoder for a code as `jaxcoded.GradientCode` describes it.
Decoder decoder_of(const nb::ndarray<const double, nb::ndim<3>, nb::c_contig, nb::device::cpu>& B,
                   std::size_t parts, std::size_t stragglers, const std::string& decoding,
                   const std::vector<PromiseTuple>& promises, double limit) {
  CodeTensor out{.rows = B.shape(0), .partitions = B.shape(1), .slices = B.shape(2),
                 .values = {B.data(), B.data() + B.size()}, .parts = parts,
                 .stragglers = stragglers, .limit = limit};
  for (const auto& [late, some, first] : promises) out.promises.push_back({late, some, first});
  if (decoding == "least_squares") {
    out.decoding = CodeTensor::Decoding::least_squares;
  } else if (decoding == "one_step") {
    out.decoding = CodeTensor::Decoding::one_step;
  } else if (decoding != "exact") {
    throw std::invalid_argument("no such decoding: " + decoding);
  }
  return Decoder(std::move(out));
}

// Return the coefficients, slices × rows, row by row; empty if there are none.
std::vector<double> coefficients(const Decoder& decoder,
                                 const std::shared_ptr<const Decoding>& decoding) {
  std::vector<double> out;
  if (!decoding) return out;
  out.resize(decoder.slices() * decoder.rows());
  for (std::size_t i = 0; i < decoding->rows.size(); ++i) {
    for (std::size_t u = 0; u < decoder.slices(); ++u) {
      out[u * decoder.rows() + decoding->rows[i]] = decoding->coefficients[u][i];
    }
  }
  return out;
}

using CardTuple = std::tuple<std::int64_t, std::int64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                             std::uint64_t, std::uint64_t>;

CardTuple introduce() {
  const Card card = Engine::instance().introduce();
  return {card.pid, card.descriptor, card.magic, card.magic_address, card.slot, card.ticket,
          card.host};
}

std::vector<Card> cards_of(const std::vector<CardTuple>& cards) {
  std::vector<Card> out;
  for (const auto& [pid, descriptor, magic, address, slot, ticket, host] : cards) {
    out.push_back({pid, descriptor, magic, address, slot, ticket, host});
  }
  return out;
}

void let_read(const std::vector<CardTuple>& cards) { Engine::instance().let_read(cards_of(cards)); }

void open(std::uint64_t index, int comm, std::uint64_t session, const std::vector<CardTuple>& cards,
          Family family, Decoder decoder, Limits limits, Erasures erasures, bool reports,
          const std::vector<std::vector<Rank>>& holders) {
  const std::vector<Card> all = cards_of(cards);
  std::vector<Rank> peers = family.ancestors;
  peers.insert(peers.end(), family.descendants.begin(), family.descendants.end());
  peers.insert(peers.end(), family.siblings.begin(), family.siblings.end());
  Engine& engine = Engine::instance();
  const std::uint64_t slot = all[static_cast<std::size_t>(family.rank)].slot;
  Member member;
  member.slot = slot;
  member.children = family.children;
  member.root = family.ancestors.empty();
  member.erasures = std::move(erasures);
  member.reports = reports;
  member.comm = MPI_Comm_f2c(comm);
  const WithoutGil released;
  auto wire = std::make_unique<MpiWire>(member.comm, session, peers, all, engine.validity(slot),
                                        engine.messages(slot), engine.memory(true), engine.memory(false));
  auto node = std::make_unique<Node>(std::move(family), std::move(decoder), limits, *wire);
  if (!holders.empty()) node->share_blocks(holders);
  engine.open(index, std::move(wire), std::move(node), std::move(member));
}

std::tuple<int, std::string> run(std::uint64_t index, std::uint64_t fingerprint,
                                 std::string signature, bool up, bool down, bool skipped,
                                 std::vector<bool> erased,
                                 const std::vector<Vector>& own, const std::vector<Vector>& out,
                                 std::pair<double, double> examples) {
  return counted(index, true, [&]() -> std::tuple<int, std::string> {
    Request request{.fingerprint = fingerprint,
                    .signature = std::move(signature),
                    .up = up,
                    .down = down,
                    .skipped = skipped,
                    .message = segments_of(own),
                    .total = segments_of(out),
                    .own = pointers_of<const std::byte>(own),
                    .out = pointers_of<std::byte>(out),
                    .erased = std::move(erased),
                    .examples = {examples.first, examples.second}};
    const Result result = Engine::instance().run(index, std::move(request));
    return {static_cast<int>(result.outcome), result.error};
  });
}

// Return the next block of a round whose vectors the next round sums; nothing at the end of the round.
std::optional<Block> take(std::uint64_t index, std::uint64_t fingerprint, std::string signature,
                          bool first, std::vector<double> costs) {
  const Taken taken = counted(index, first, [&] {
    return Engine::instance().take(
        index, {.fingerprint = fingerprint,
                .signature = std::move(signature),
                .costs = std::move(costs),
                .continues = !first});
  });
  if (!taken.error.empty()) throw Closed{(taken.desynchronized ? "Desynchronized: " : "") + taken.error};
  if (!taken.work) return {};
  return taken.work->block;
}

// End a round that `take` began.
std::tuple<int, std::string> end_of_blocks(std::uint64_t index) {
  const Result result = counted(index, false, [&] { return Engine::instance().run(index, {.continues = true}); });
  return {static_cast<int>(result.outcome), result.error};
}

// Return what a group remembers of its rounds: columns of numbers, by name.
nb::dict telemetry(std::uint64_t index) {
  std::vector<RoundRecord> records;
  std::vector<StepTime> step_times;
  std::map<Rank, Link> links;
  std::vector<Rank> children;
  std::vector<double> arrived;
  std::vector<bool> used;
  std::vector<std::uint32_t> computed;
  {
    const WithoutGil released;
    Engine::instance().with(index, [&](Member& member) {
      const Telemetry& known = member.node->telemetry();
      children = member.node->columns();
      records = known.records();
      for (const RoundRecord& record : records) {
        for (std::size_t child = 0; child < children.size(); ++child) {
          arrived.push_back(known.arrival(record.round, child));
          used.push_back(known.was_used(record.round, child));
        }
        for (const Computed& blocks : known.computed(record.round)) {
          computed.insert(computed.end(), {blocks.own, blocks.others, blocks.unused});
        }
      }
      step_times = member.node->step_times();
      links = member.wire->links();
      return 0;
    });
  }
  nb::dict out;
  const auto column = [&](const char* name, const auto& rows, auto read) {
    nb::list values;
    for (const auto& row : rows) values.append(read(row));
    out[name] = values;
  };
  column("round", records, [](const RoundRecord& record) { return record.round; });
  column("work", records, [](const RoundRecord& record) { return record.work; });
  column("started", records, [](const RoundRecord& record) { return record.started; });
  column("decided", records, [](const RoundRecord& record) { return record.decided; });
  column("ended", records, [](const RoundRecord& record) { return record.ended; });
  column("decider", records, [](const RoundRecord& record) { return record.decider; });
  column("outcome", records, [](const RoundRecord& record) { return record.outcome; });
  column("payload", records, [](const RoundRecord& record) { return record.payload; });
  column("skipped", records, [](const RoundRecord& record) { return record.skipped; });
  column("approximate", records, [](const RoundRecord& record) { return record.approximate; });
  column("shared", records, [](const RoundRecord& record) { return record.shared; });
  column("loop", records, [](const RoundRecord& record) { return record.loop; });
  column("busy", records, [](const RoundRecord& record) { return record.busy; });
  column("blocks", records, [](const RoundRecord& record) { return record.blocks; });
  column("computed", computed, [](std::uint32_t blocks) { return blocks; });
  column("children", children, [](Rank rank) { return rank; });
  column("arrived", arrived, [](double seconds) { return seconds; });
  column("used", used, [](bool is_used) { return is_used; });
  column("told", step_times, [](const StepTime& step_time) { return step_time.rank; });
  column("step_times", step_times, [](const StepTime& step_time) { return step_time.work; });
  column("silent", step_times, [](const StepTime& step_time) { return step_time.silent; });
  column("peers", links, [](const auto& link) { return link.first; });
  column("link_bytes", links, [](const auto& link) { return link.second.bytes; });
  column("link_seconds", links, [](const auto& link) { return link.second.seconds; });
  return out;
}

// Return the records of a group from now on, until the group is closed or another reader subscribes.
// `subscribe` gives a node the function to call with each record. The records come in a capsule: a thread may
// keep it until the process ends, and nanobind would report any other object as a leak.
template <class Record>
nb::capsule reports_of(std::uint64_t index,
                       void (Node::*subscribe)(std::function<void(const Record&)>)) {
  auto out = std::make_shared<Reports<Record>>();
  // closed together with the hook: when the node ends, or another hook takes its place
  const std::shared_ptr<Reports<Record>> open(out.get(), [out](Reports<Record>* reports) { reports->close(); });
  {
    const WithoutGil released;
    Engine::instance().with(index, [&](Member& member) {
      (member.node.get()->*subscribe)([open](const Record& record) { open->add(record); });
      return 0;
    });
  }
  return nb::capsule(new std::shared_ptr<Reports<Record>>(std::move(out)), [](void* pointer) noexcept {
    delete static_cast<std::shared_ptr<Reports<Record>>*>(pointer);
  });
}

// Return the next record; nothing after the last one.
template <class Record>
std::optional<Record> next_of(nb::capsule reports) {
  const auto from = *static_cast<std::shared_ptr<Reports<Record>>*>(reports.data());
  const WithoutGil released;
  return from->next();
}

// Return how many records were lost since the last call, because the reader is slower than the rounds.
template <class Record>
std::uint64_t lost_of(nb::capsule reports) {
  return (*static_cast<std::shared_ptr<Reports<Record>>*>(reports.data()))->take_lost();
}

nb::capsule reports(std::uint64_t index) { return reports_of(index, &Node::on_round); }

nb::object next_report(nb::capsule reports) {
  const auto record = next_of<RoundRecord>(reports);
  if (!record) return nb::none();
  return nb::make_tuple(record->round, record->work, record->started, record->decided, record->ended, record->decider,
                        static_cast<int>(record->outcome), record->skipped, record->approximate);
}

nb::capsule record(std::uint64_t index) { return reports_of(index, &Node::on_dealt); }

std::optional<DealtTuple> next_dealt(nb::capsule reports) {
  const auto dealt = next_of<Dealt>(reports);
  if (const auto lost = lost_of<Dealt>(reports)) {
    throw std::runtime_error("it takes longer to write than the rounds take, and " + std::to_string(lost) +
                             " rounds are lost");
  }
  if (!dealt) return {};
  return DealtTuple{dealt->round, dealt->call, dealt->division};
}

void replay(std::uint64_t index, const std::vector<DealtTuple>& rounds) {
  const std::vector<Dealt> all = dealt_in(rounds);
  const WithoutGil released;
  Engine::instance().with(index, [&](Member& member) {
    member.node->replay(all);
    return 0;
  });
}

void replan(std::uint64_t index, std::uint64_t next, const std::vector<Rank>& children,
            Decoder decoder, Erasures erasures) {
  const WithoutGil released;
  Engine::instance().replan(index, next, children, std::move(decoder), std::move(erasures));
}

// Return a call whose vectors lie on a GPU, like the calls of XLA's handlers.
DeviceCall device_call(std::uint64_t index, std::uint64_t stream, std::uint64_t fingerprint,
                       std::string signature, bool continues, std::uint64_t skipped,
                       const std::vector<Vector>& own) {
  return {.stream = reinterpret_cast<cuda::Stream>(stream),
          .group = index,
          .request = {.fingerprint = fingerprint,
                      .signature = std::move(signature),
                      .message = segments_of(own),
                      .own = pointers_of<const std::byte>(own),
                      .continues = continues},
          .skipped = reinterpret_cast<const void*>(skipped)};
}

std::tuple<int, std::string> device_run(std::uint64_t index, std::uint64_t stream,
                                        std::uint64_t fingerprint, std::string signature, bool up,
                                        bool down, bool continues, std::uint64_t skipped,
                                        std::uint64_t erased, std::size_t ranks,
                                        const std::vector<Vector>& own,
                                        const std::vector<Vector>& out) {
  return counted(index, !continues, [&]() -> std::tuple<int, std::string> {
    DeviceCall call =
        device_call(index, stream, fingerprint, std::move(signature), continues, skipped, own);
    call.erased = reinterpret_cast<const void*>(erased);
    call.ranks = ranks;
    call.request.up = up;
    call.request.down = down;
    call.request.total = segments_of(out);
    call.request.out = pointers_of<std::byte>(out);
    const Result result = run_on_device(std::move(call));
    return {static_cast<int>(result.outcome), result.error};
  });
}

std::string device_extend(std::uint64_t index, std::uint64_t stream, std::uint64_t fingerprint,
                          std::string signature, bool continues, std::uint64_t skipped,
                          const std::vector<Vector>& own, const std::vector<Vector>& message,
                          const std::vector<Vector>& total) {
  return counted(index, !continues, [&] {
    DeviceCall call =
        device_call(index, stream, fingerprint, std::move(signature), continues, skipped, own);
    call.request.message = segments_of(message);
    call.request.total = segments_of(total);
    return extend_on_device(std::move(call));
  });
}

}  // namespace

}  // namespace jaxcoded

NB_MODULE(_engine, module) {
  using namespace jaxcoded;
  using Release = nb::call_guard<WithoutGil>;
  module.doc() = "The engine of jaxcoded.";
  module.attr("sources") = JAXCODED_SOURCES;

  // Return the version of the MPI that this module has loaded; mpi4py may have loaded a different MPI.
  module.def("mpi_library", [] {
    char words[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(words, &length);
    return std::string(words, static_cast<std::size_t>(length));
  });
  module.def("thread_multiple", [] {
    int provided = 0;
    MPI_Query_thread(&provided);
    return provided == MPI_THREAD_MULTIPLE;
  });

  nb::class_<Family>(module, "Family")
      .def("__init__",
           [](Family* self, Rank rank, std::vector<Rank> ancestors, std::vector<Rank> children,
              std::vector<Rank> descendants, std::vector<Rank> leaves, std::vector<Rank> siblings,
              bool delegates) {
             new (self) Family{rank, std::move(ancestors), std::move(children),
                               std::move(descendants), std::move(leaves), std::move(siblings),
                               delegates};
           },
           nb::arg("rank"), nb::arg("ancestors"), nb::arg("children"), nb::arg("descendants"),
           nb::arg("leaves"), nb::arg("siblings") = nb::list(), nb::arg("delegates") = false);
  nb::class_<Decoder>(module, "Decoder")
      .def(nb::init<>())
      .def("__init__", [](Decoder* self, const nb::ndarray<const double, nb::ndim<3>, nb::c_contig,
                                                           nb::device::cpu>& B,
                          std::size_t parts, std::size_t stragglers, const std::string& decoding,
                          const std::vector<PromiseTuple>& promises, double limit) {
        new (self) Decoder(decoder_of(B, parts, stragglers, decoding, promises, limit));
      })
      .def("decode", [](Decoder& self, const std::vector<std::size_t>& order,
                        const std::vector<bool>& possible) {
        return coefficients(self, self.decode(order, possible));
      })
      .def("approximate", [](Decoder& self, const std::vector<bool>& answered) {
        return coefficients(self, self.approximate(answered));
      })
      .def_prop_ro("questions", &Decoder::questions)
      .def("check", [](Decoder& self, std::vector<Parity::Check> checks,
                       const std::vector<std::tuple<double, double, double, double>>& below) {
        const CodeTensor& code = self.tensor();
        std::vector<double> sizes;
        for (std::size_t row = 0; row < code.rows; ++row) {
          const double* const values = code.row(row);
          sizes.push_back(std::accumulate(values, values + code.partitions * code.slices, 0.0,
                                          [](double sum, double b) { return sum + std::abs(b); }));
        }
        std::vector<Below> children;
        for (const auto& [amplification, layers, widest, absolute] : below) {
          children.push_back({amplification, layers, widest, absolute});
        }
        self.check(Parity(std::move(checks), std::move(sizes), std::move(children)));
      });
  nb::class_<Erasures>(module, "Erasures")
      .def("__init__", [](Erasures* self, Rank root,
                          const std::vector<std::tuple<Rank, std::vector<Rank>, Decoder>>& parents) {
        std::vector<Parent> all;
        for (const auto& [rank, children, decoder] : parents) {
          all.push_back({rank, children, decoder});
        }
        new (self) Erasures(root, std::move(all));
      })
      .def("missing", [](Erasures& self, const std::vector<bool>& erased) {
        return self.judge(erased).missing;
      })
      .def("why_not", [](Erasures& self, const std::vector<bool>& erased) {
        return self.judge(erased).why_not;
      });
  nb::enum_<OnDeadline>(module, "OnDeadline")
      .value("wait", OnDeadline::wait)
      .value("raise", OnDeadline::raise)
      .value("approximate", OnDeadline::approximate);
  nb::enum_<Compares>(module, "Compares")
      .value("what_has_come", Compares::what_has_come)
      .value("until_deadline", Compares::until_deadline)
      .value("all", Compares::all);
  nb::enum_<OnContradiction>(module, "OnContradiction")
      .value("raise", OnContradiction::raise)
      .value("warn", OnContradiction::warn)
      .value("drop", OnContradiction::drop);
  nb::class_<Limits>(module, "Limits")
      .def(nb::init<>())
      .def_rw("piece_bytes", &Limits::piece_bytes)
      .def_rw("announced_bytes", &Limits::announced_bytes)
      .def_rw("history_bytes", &Limits::history_bytes)
      .def_rw("history_rounds", &Limits::history_rounds)
      .def_rw("history_most", &Limits::history_most)
      .def_rw("ahead_bytes", &Limits::ahead_bytes)
      .def_rw("orphan_seconds", &Limits::orphan_seconds)
      .def_rw("stall_seconds", &Limits::stall_seconds)
      .def_rw("stuck_seconds", &Limits::stuck_seconds)
      .def_rw("silent_seconds", &Limits::silent_seconds)
      .def_rw("on_deadline", &Limits::on_deadline)
      .def_rw("compares", &Limits::compares)
      .def_rw("waits_for_all", &Limits::waits_for_all)
      .def_rw("on_contradiction", &Limits::on_contradiction)
      .def_rw("deadline_seconds", &Limits::deadline_seconds)
      .def_rw("deadline_rounds", &Limits::deadline_rounds)
      .def_rw("deadline_share", &Limits::deadline_share)
      .def_rw("telemetry_rounds", &Limits::telemetry_rounds)
      .def_rw("step_times_seconds", &Limits::step_times_seconds)
      .def_rw("sections_from", &Limits::sections_from)
      .def_rw("section_pieces", &Limits::section_pieces)
      .def_rw("slices", &Limits::slices)
      .def_rw("parts", &Limits::parts)
      .def_rw("least_piece_bytes", &Limits::least_piece_bytes)
      .def("piece_for", &Limits::piece_for);

  // `choices`: dicts from a port to the length of its message. Returns a tuple (maker, choice, number of
  // pieces) for each section, and how much the busiest port moves.
  module.def("section_shares", [](const std::vector<std::size_t>& makers,
                                  const std::vector<std::map<std::size_t, double>>& choices,
                                  std::size_t ports, std::uint32_t pieces,
                                  std::optional<std::size_t> taker) {
    bool known = std::ranges::all_of(makers, [&](std::size_t port) { return port < ports; });
    std::vector<std::vector<PortMessage>> messages;
    for (const auto& choice : choices) {
      auto& some = messages.emplace_back();
      for (const auto& [port, length] : choice) {
        some.push_back({port, length});
        known &= port < ports;
      }
    }
    if (makers.empty() || choices.empty() || !pieces || !known) {
      throw nb::value_error("there are no makers, choices, pieces, or no such ports");
    }
    const SectionShares result = section_shares(makers, messages, ports, pieces, taker);
    std::vector<std::tuple<std::size_t, std::size_t, std::uint32_t>> out;
    for (const auto& [maker, choice, count] : result.shares) out.emplace_back(maker, choice, count);
    return std::pair(out, result.busiest);
  }, nb::arg("makers"), nb::arg("choices"), nb::arg("ports"), nb::arg("pieces"), nb::arg("taker") = nb::none());

  module.attr("Closed") =
      nb::steal(PyErr_NewException("jaxcoded.transport._engine.Closed", PyExc_RuntimeError, nullptr));
  nb::register_exception_translator([](const std::exception_ptr& thrown, void* closed_type) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Closed& closed) {
      PyErr_SetString(static_cast<PyObject*>(closed_type), closed.text.c_str());
    } catch (const cuda::Failure& failure) {
      PyErr_SetString(PyExc_RuntimeError, failure.text.c_str());
    }
  }, module.attr("Closed").ptr());

  module.def("start", [] { Engine::instance(); }, Release());
  module.def("introduce", &introduce, Release());
  module.def("forget", [](const CardTuple& card) {
    Engine::instance().forget(cards_of({card}).front());
  }, Release());
  module.def("let_read", &let_read, Release());
  module.attr("most_started") = Engine::most_started;
  module.def("open", &open);
  module.def("fault_tolerant", &fault_tolerant);
  module.def("enter", [](int comm, Rank root, double silent_seconds) {
    Engine::instance().enter(MPI_Comm_f2c(comm), root, silent_seconds);
  }, Release());
  module.def("join", [] { Engine::instance().join(); }, Release());
  module.def("discard", [](std::uint64_t index) { Engine::instance().discard(index); }, Release());
  module.def("run", &run, Release());
  module.def("take", &take, Release());
  module.def("end_of_blocks", &end_of_blocks, Release());
  module.def("leave_share", [](std::uint64_t index) { Engine::instance().leave_share(index); },
             Release());
  module.def("load_cuda", &cuda::load, Release());
  module.def("device_run", &device_run, Release());
  module.def("device_extend", &device_extend, Release());
  module.def("device_copies", [](std::uint64_t stream, std::uint64_t own, std::uint64_t out,
                                 std::uint64_t bytes) {
    return time_copies(reinterpret_cast<cuda::Stream>(stream),
                       reinterpret_cast<const std::byte*>(own), reinterpret_cast<std::byte*>(out),
                       bytes);
  }, Release());
  module.def("pinned_bytes", &pinned_bytes, Release());
  module.def("note_failure", [](std::uint64_t index, std::string words) {
    Engine::instance().note_failure(index, words);
  }, Release());
  module.def("close", [](std::uint64_t index, double seconds) {
    return Engine::instance().close(index, seconds);
  }, Release());
  module.def("abandon", [](std::uint64_t index, const std::string& failure) {
    Engine::instance().abandon(index, failure);
  }, Release());
  module.def("stop", [](double seconds, const std::string& failure, int status) {
    return Engine::instance().stop(seconds, failure, status);
  }, Release());

  const auto query = [&](const char* name, auto read) {
    module.def(name, [read](std::uint64_t index) {
      return Engine::instance().with(index, [read](Member& member) { return read(member); });
    }, Release());
  };
  query("lag", [](Member& member) { return member.lag(); });
  query("next_round", [](Member& member) { return member.next(); });
  query("undone", [](Member& member) { return member.started.size(); });
  query("alike", [](Member& member) { return member.node->alike(); });
  query("decided", [](Member& member) { return member.node->decided(); });
  query("departed", [](Member& member) { return member.node->departed(); });
  query("rounds_of_all", [](Member& member) {
    const Round failed = member.node->failed_alone();
    const Round next = member.node->next();
    return (failed ? std::min(failed, next) : next) - 1;
  });
  query("history_bytes", [](Member& member) { return member.node->history_bytes(); });
  query("memory_bytes", [](Member& member) { return member.memory_bytes(); });
  query("fetched_bytes", [](Member& member) { return member.node->fetched_bytes(); });
  query("formed_bytes", [](Member& member) { return member.node->formed_bytes(); });
  query("compared_rounds", [](Member& member) { return member.node->compared_rounds(); });
  query("status", [](Member& member) { return member.node->status(); });

  module.def("telemetry", &telemetry);
  module.def("reports", &reports);
  module.def("next_report", &next_report);
  module.def("record", &record);
  module.def("next_dealt", &next_dealt);
  module.def("replay", &replay);
  // Blocks until a group's call waits after its deadline. Returns the group and the ranks that the call waits
  // for; None at the end of the engine.
  module.def("next_warning", [] {
    auto& warnings = Engine::instance().warnings();
    auto out = warnings.next();
    if (const auto lost = warnings.take_lost(); out && lost) {
      out->second += "; " + std::to_string(lost) + " warnings before it are lost, as the log is slow";
    }
    return out;
  }, Release());
  module.def("replan", &replan);
  module.def("computes_with", [](std::uint64_t index, double eps) {
    Engine::instance().with(index, [&](Member& member) { member.node->computes_with(eps); });
  }, Release());
  // Other threads have their turns while the new snapshot is copied, and while the previous one is freed.
  module.def("keep_state", [](std::uint64_t index, std::uint64_t address, std::uint64_t bytes) {
    State state = state_of({reinterpret_cast<const std::byte*>(address), bytes});
    state = Engine::instance().with(index, [&](Member& member) {
      return member.node->keep_state(member.next(), std::move(state));
    });
  }, Release());
  // Fetch the newest snapshot of the nearest ancestor that has one, within `seconds`. Returns its round, or 0.
  module.def("fetch_state", [](std::uint64_t index, double seconds) {
    Engine& engine = Engine::instance();
    engine.with(index, [](Member& member) { member.node->ask_state(); return 0; });
    engine.wait(index, seconds, [](Member& member) {
      return member.node->state_round() != 0 || member.node->state_missing();
    });
    return engine.with(index, [](Member& member) {
      const Round round = member.node->state_round();
      if (!round) member.node->ask_no_more();
      return round;
    });
  }, Release());
  module.def("drained", [](std::uint64_t index, double seconds) {
    return Engine::instance().wait(index, seconds, [](Member& member) { return member.queue.empty(); });
  }, Release());
  module.def("state", [](std::uint64_t index) {
    State state;
    {
      const WithoutGil released;
      state = Engine::instance().with(index, [](Member& member) { return member.node->take_state(); });
    }
    return bytes_of(state.all());
  });
  module.def("resume", [](std::uint64_t index) {
    return Engine::instance().with(index, [](Member& member) {
      if (!member.queue.empty()) return false;
      member.node->resume();
      return true;
    });
  }, Release());

  module.def("expect_state", [](std::uint64_t index) {
    Engine::instance().with(index, [](Member& member) { member.node->expect_state(); return 0; });
  }, Release());
  module.def("watch", [](std::uint64_t index, bool whether) {
    Engine::instance().with(index, [&](Member& member) { member.node->watch(whether); return 0; });
  }, Release());

  const auto handler = [&](const char* name, XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
    module.attr(name) = nb::capsule(reinterpret_cast<void*>(function), "xla._CUSTOM_CALL_TARGET");
  };
  handler("round_handler", round_handler);
  handler("part_handler", part_handler);
  handler("take_handler", take_handler);
  handler("slices_handler", slices_handler);
  handler("start_handler", start_handler);
  handler("done_handler", done_handler);
  handler("lag_handler", lag_handler);
  handler("computed_handler", computed_handler);
  handler("devices_round_handler", devices_round_handler);
  handler("devices_start_handler", devices_start_handler);
  handler("devices_done_handler", devices_done_handler);
  handler("devices_lag_handler", devices_lag_handler);
  handler("cuda_round_handler", cuda_round_handler);
  handler("cuda_part_handler", cuda_part_handler);
  handler("cuda_take_handler", cuda_take_handler);
  handler("cuda_computed_handler", cuda_computed_handler);
  handler("cuda_lag_handler", cuda_lag_handler);
}
