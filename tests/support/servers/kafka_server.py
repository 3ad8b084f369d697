"""Run one Kafka node.

Invariant: one KRaft node is broker and controller, on loopback, with its topics in one folder.

Topics are created explicitly, never by first use; all internal topics have one replica.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from tests.support.servers import programs
from tests.support.servers.server import LOOPBACK, Server, ServerFailed, accepts, free_port

HEAP_MIB = 256
FORMAT_SECONDS_MAX = 60

_LOGGING = """status = ERROR
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %c{1} %m%n
rootLogger.level = WARN
rootLogger.appenderRef.out.ref = out
"""


def users_producer(bootstrap: str, **more: Any) -> Producer:
    """Return a producer with the settings of a user who needs order.

    Such a producer keeps its position if a broker that is new to a topic refuses the first batch, and sends it again
    with the second. `more` are its settings, with _ for a dot.
    """
    settings = {name.replace("_", "."): value for name, value in more.items()}
    return Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **settings})


class Kafka(Server):
    """A Kafka node: `bootstrap` is its address.

    A restart after SIGKILL finds everything that was acknowledged.
    """

    name = "kafka"
    start_seconds = 90.0  # 4 s on an idle machine; ten times that while both cores compile

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        owner_pid: int | None = None,
        detached: bool = False,
        controller_port: int | None = None,
        properties: Mapping[str, object] | None = None,
        log_levels: Mapping[str, str] | None = None,
    ) -> None:
        """Configure a node.

        `properties` are the node's own and override those chosen here; `log_levels` are those of its loggers, by
        name.
        """
        super().__init__(folder, port=port, owner_pid=owner_pid, detached=detached)
        self._properties = dict(properties or {})
        self._log_levels = dict(log_levels or {})
        self.controller_port = controller_port or free_port()

    @property
    def bootstrap(self) -> str:
        """Return `host:port`, as clients need it."""
        return f"{LOOPBACK}:{self.port}"

    def prepare(self) -> None:
        """Write the configuration; format the folder of the topics, once."""
        self._configuration.write_text(
            "".join(f"{name}={value}\n" for name, value in {**self._chosen(), **self._properties}.items())
        )
        levels = [
            f"logger.l{number}.name = {name}\nlogger.l{number}.level = {level}\n"
            for number, (name, level) in enumerate(self._log_levels.items())
        ]
        (self.folder / "log4j2.properties").write_text(_LOGGING + "".join(levels))
        if (self._data / "meta.properties").exists():
            return
        done = subprocess.run(
            [
                *self._java("kafka.tools.StorageTool"),
                "format",
                "-c",
                str(self._configuration),
                "-t",
                "bmVhcmtpbi10ZXN0cw",
            ],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=FORMAT_SECONDS_MAX,
        )
        if done.returncode != 0:
            raise ServerFailed(f"kafka: {self._data} could not be formatted: {(done.stdout + done.stderr).strip()}")

    def command(self) -> list[str]:
        """Return the command of the JVM itself, not of Kafka's shell script: signals reach the server process."""
        return [*self._java("kafka.Kafka"), str(self._configuration)]

    def ready(self) -> bool:
        """Return whether the node has registered itself and serves."""
        if not accepts(self.port):
            return False
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0, "socket.timeout.ms": 1000})
        try:
            return bool(admin.list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def log_bytes(self, topic: str, partition: int = 0) -> int:
        """Return the size of a partition's log, all segments together."""
        return sum(path.stat().st_size for path in self._log(topic, partition).parent.glob("*.log"))

    def truncate(self, topic: str, size_bytes: int, partition: int = 0) -> None:
        """Cut the log of a partition of a stopped node, of one segment, as a disk that loses writes does."""
        os.truncate(self._log(topic, partition), size_bytes)

    def start_offsets(self) -> str:
        """Return the checkpoint of where each log starts: a line of topic, partition and offset, unless it is 0."""
        return (self._data / "log-start-offset-checkpoint").read_text()

    def _log(self, topic: str, partition: int) -> Path:
        return self._data / f"{topic}-{partition}" / f"{0:020}.log"

    @property
    def _configuration(self) -> Path:
        return self.folder / "server.properties"

    @property
    def _data(self) -> Path:
        return self.folder / "topics"

    def _java(self, main_class: str) -> list[str]:
        jars = programs.kafka_jars()
        return [
            programs.java(),
            f"-Xmx{HEAP_MIB}m",
            "-XX:+UseSerialGC",  # the collector with the least memory and threads
            "-XX:-UsePerfData",  # else each JVM leaves a file in /tmp when it is killed
            "-Djava.net.preferIPv4Stack=true",
            f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}",
            "-cp",
            os.path.join(jars, "*"),
            main_class,
        ]

    def _chosen(self) -> dict[str, object]:
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{LOOPBACK}:{self.controller_port}",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{LOOPBACK}:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": self._data,
            "auto.create.topics.enable": "false",
            "num.partitions": 1,
            "default.replication.factor": 1,
            "min.insync.replicas": 1,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 4,  # 50 by default: each is a folder to create and to load
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 4,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "share.coordinator.state.topic.num.partitions": 4,
            "group.initial.rebalance.delay.ms": 0,
            # A killed node is accepted again when its former session has ended: 9 s by default.
            "broker.session.timeout.ms": 2000,
            "broker.heartbeat.interval.ms": 500,
            "num.network.threads": 2,
            "num.io.threads": 4,
            "log.cleaner.dedupe.buffer.size": 8 * 1024 * 1024,  # 128 MiB by default: half of the heap
            "log.segment.bytes": 256 * 1024 * 1024,
            # Segments of trimmed records are removed at this interval: 300 s by default.
            "log.retention.check.interval.ms": 10_000,
            "controlled.shutdown.enable": "false",  # there is no other node to move partitions to
        }
