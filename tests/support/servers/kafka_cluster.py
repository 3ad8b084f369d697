"""Run Kafka with several brokers: one controller and N brokers, each a process that a test may kill.

with KafkaCluster(folder, 3) as cluster: cluster.bootstrap, cluster.brokers[1].kill(), cluster.brokers[1].start()
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.servers.kafka_server import Kafka
from tests.support.servers.server import LOOPBACK, accepts, free_port

CONTROLLER_ID = 100


class _Controller(Kafka):
    """The node that elects leaders and holds no topics."""

    def ready(self) -> bool:
        """Return whether the port accepts connections; the controller answers no client."""
        return accepts(self.controller_port)


class KafkaCluster:
    """One controller, and brokers with ids 1 to N."""

    def __init__(self, folder: Path, brokers: int) -> None:
        port = free_port()
        shared = {
            "controller.quorum.voters": f"{CONTROLLER_ID}@{LOOPBACK}:{port}",
            "offsets.topic.replication.factor": brokers,
            "transaction.state.log.replication.factor": brokers,
        }
        endpoint = f"CONTROLLER://{LOOPBACK}:{port}"
        own = {
            "process.roles": "controller",
            "node.id": CONTROLLER_ID,
            "listeners": endpoint,
            "advertised.listeners": endpoint,
        }
        self._controller = _Controller(folder / "controller", controller_port=port, properties={**shared, **own})
        self.brokers: dict[int, Kafka] = {}
        for number in range(1, brokers + 1):
            client_port = free_port()
            listener = f"PLAINTEXT://{LOOPBACK}:{client_port}"
            roles = {"process.roles": "broker", "node.id": number, "listeners": listener}
            self.brokers[number] = Kafka(
                folder / f"broker-{number}",
                port=client_port,
                controller_port=port,
                properties={**shared, **roles, "advertised.listeners": listener},
            )

    @property
    def bootstrap(self) -> str:
        """Return the addresses of all brokers, as clients need them."""
        return ",".join(broker.bootstrap for broker in self.brokers.values())

    def __enter__(self) -> Self:
        try:
            self._controller.start()
            with ThreadPoolExecutor(len(self.brokers)) as threads:
                list(threads.map(lambda broker: broker.start(), self.brokers.values()))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (*self.brokers.values(), self._controller):
            server.kill()
