"""Coded sums without counted examples, for values that a test weights itself, or that belong to no batch."""

from jaxcoded.collectives import allreduce as _allreduce
from jaxcoded.collectives import host, nonblocking

allreduce = host.summed


def coded_allreduce(x, group, **asked):
    return _allreduce.summed(x, group, **asked).plain()


def coded_reduce(x, group, **asked):
    asked |= {"name": "coded_reduce", "down": False}
    return _allreduce.summed(x, group, **asked).plain()


def coded_allreduce_start(x, group, bucket_bytes=None, **asked):
    groups = nonblocking._taking_turns(group)
    return nonblocking.started(x, groups, bucket_bytes=bucket_bytes, **asked)
