// An MPI that on command refuses some messages, and receives some pieces of vectors not at all or only in part.
// Or an MPI that takes messages and loses one of them, or all that go to one rank. This library must be preloaded.
#include <errno.h>
#include <mpi.h>
#include <string.h>
#include <sys/uio.h>

enum { control = 1, first_vector = 5, pull = 10, most = 64 };  // as in mpi_wire.h and message.h

static int each = 0, asked = 0, pieces = 0;
static int loses_sent = 0, loses_received = 0, loses_asking = 0, loses_piece = 0, loses_to = -1, lost = 0;
static int losses = 0;
static MPI_Request inboxes[most];
static int count_of_inboxes = 0;

void refuse_each(int number) { each = number; }

// How many messages of the engine were refused.
int refused(void) { return each ? asked / each : 0; }

// From now on, lose the message of this number on its way out of this process, or into it.
void lose_sent(int number) { loses_sent = number; }
void lose_received(int number) { loses_received = number; }

// The same for the message that requests a piece, or that brings one.
void lose_asking(int number) { loses_asking = number; }
void lose_piece(int number) { loses_piece = number; }

// From now on, lose all messages to this rank.
void lose_to(int rank) { loses_to = rank; }

int has_lost(void) { return lost; }
int all_lost(void) { return losses; }

// Vectors go through MPI, as between hosts.
ssize_t process_vm_readv(pid_t process, const struct iovec* to, unsigned long places, const struct iovec* from,
                         unsigned long theirs, unsigned long flags) {
  errno = EPERM;
  return -1;
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request* request) {
  if (each && tag >= first_vector && ++pieces % each == 0) {
    if (pieces / each % 2) return MPI_ERR_NO_MEM;
    --count;
  }
  const int outcome = PMPI_Irecv(data, count, type, from, tag, comm, request);
  if (tag == control) inboxes[count_of_inboxes++ % most] = *request;
  return outcome;
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  if (each && tag == control && ++asked % each == 0) return MPI_ERR_NO_MEM;
  const int asks = tag == control && *(const unsigned char*)data == pull, brings = tag >= first_vector;
  if ((tag == control && (to == loses_to || (loses_sent && --loses_sent == 0))) ||
      (asks && loses_asking && --loses_asking == 0) || (brings && loses_piece && --loses_piece == 0)) {
    lost = 1;
    ++losses;
    *request = MPI_REQUEST_NULL;  // the engine asks for the outcome of this request next
    return MPI_SUCCESS;
  }
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}

int MPI_Test(MPI_Request* request, int* over, MPI_Status* status) {
  if (lost == 1 && *request == MPI_REQUEST_NULL) {
    lost = 2;
    return MPI_ERR_INTERN;
  }
  return PMPI_Test(request, over, status);
}

static int is_inbox(MPI_Request request) {
  for (int i = 0; i < most; ++i) {
    if (request != MPI_REQUEST_NULL && inboxes[i] == request) return 1;
  }
  return 0;
}

int MPI_Testsome(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses) {
  static MPI_Request before[most];
  if (!loses_received || count > most) return PMPI_Testsome(count, requests, done, indices, statuses);
  memcpy(before, requests, (size_t)count * sizeof *requests);
  const int outcome = PMPI_Testsome(count, requests, done, indices, statuses);
  if (outcome != MPI_SUCCESS) return outcome;
  for (int i = 0; i < *done; ++i) {
    if (!is_inbox(before[indices[i]]) || statuses[i].MPI_TAG != control || --loses_received) continue;
    lost = 2;
    for (int j = 0; j < *done; ++j) statuses[j].MPI_ERROR = j == i ? MPI_ERR_INTERN : MPI_SUCCESS;
    return MPI_ERR_IN_STATUS;
  }
  return MPI_SUCCESS;
}
