"""Prometheus metrics of this process's communicators. Requires the package prometheus-client:

from prometheus_client import REGISTRY, start_http_server
import collx.prometheus

REGISTRY.register(collx.prometheus.Collector())
start_http_server(9100 + local_rank)
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as _Collector

from collx import communicator

__all__ = ["Collector"]

_OF_COMMUNICATOR = ["communicator", "rank"]


class Collector(_Collector):
    """Collects `Communicator.stats` of every live communicator. Metrics have the labels
    "communicator" and "rank".

    - `collx_calls_total` and `collx_bytes_total`, by "function": calls, and bytes of their inputs;
    - `collx_waited_seconds_total`, by "peer": the time that calls have waited for a rank (on
      CUDA with `watchdog=True`);
    - `collx_completed_calls`, by "peer": the calls that a rank has completed;
    - `collx_failed`: 1 after a failure.
    """

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics. prometheus_client calls this for each collection."""
        calls = CounterMetricFamily(
            "collx_calls", "Calls of this rank.", labels=[*_OF_COMMUNICATOR, "function"]
        )
        nbytes = CounterMetricFamily(
            "collx_bytes", "Bytes of the inputs of calls.", labels=[*_OF_COMMUNICATOR, "function"]
        )
        waited = CounterMetricFamily(
            "collx_waited_seconds",
            "Time that calls of this rank have waited for a rank.",
            labels=[*_OF_COMMUNICATOR, "peer"],
        )
        completed = GaugeMetricFamily(
            "collx_completed_calls",
            "Calls that a rank has completed.",
            labels=[*_OF_COMMUNICATOR, "peer"],
        )
        failed = GaugeMetricFamily(
            "collx_failed", "Whether a call has failed.", labels=_OF_COMMUNICATOR
        )
        for one in communicator.live():
            labels = [one.name, str(one.rank)]
            try:
                found = one.stats()
            except ValueError:
                if one.destroyed:  # meanwhile, by another thread
                    continue
                raise
            for function, count in found.calls.items():
                calls.add_metric([*labels, function], count)
                nbytes.add_metric([*labels, function], found.bytes[function])
            for peer, seconds in enumerate(found.waited or ()):
                waited.add_metric([*labels, str(peer)], seconds)
            for peer, count in enumerate(found.completed or ()):
                completed.add_metric([*labels, str(peer)], count)
            failed.add_metric(labels, float(one.poisoned))
        yield from (calls, nbytes, waited, completed, failed)
