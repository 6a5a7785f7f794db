"""A rank's transfer node: staging, leases and sessions of one engine rank, on a thread and event loop of its own.

The engine's thread calls the few methods that never block; peers and the worker's actor come over gRPC. See
docs/architecture.md, "The node's contract with an engine", and kvtransfer/README.md for states and endings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from kvtransfer.config import KvTransferSettings
from kvtransfer.control_service import KvControlServicer
from kvtransfer.layout import holding
from kvtransfer.memory import host_memory, use_device_of
from kvtransfer.metrics import Observation
from kvtransfer.peers import Peers
from kvtransfer.push import KvTransferServicer
from kvtransfer.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS, control_metadata, host_id, host_port, quiet_poller
from kvtransfer.runtime import NodeRuntime
from kvtransfer.tls import bind, channel
from kvtransfer.transport_choice import auto_order
from kvtransfer.transports import TransportContext, create_transport, reach_of, to_open
from kvtransfer.transports.base import CanFail, Memory, Transport, TransportError
from protos.errors import Code, SplitpointError
from protos.grpc_errors import from_rpc_error
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from protos.splitpoint.v1 import kv_transfer_pb2_grpc as pb_grpc
from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
REGISTER_TIMEOUT_S = 30.0


class KvNode:
    """One rank's node.

    `compatibility` is this rank's; `block_bytes` what one block of all its layers takes in a slot. `memory(num_bytes)` makes
    the two staging areas (one-dimensional uint8, numpy or torch); it must stay valid until `stop`. `transports` replaces the
    ones that `settings.transports` names.
    """

    def __init__(
        self,
        settings: KvTransferSettings,
        *,
        rank: int,
        incarnation: str,
        compatibility: pb.KvCompatibility,
        block_bytes: int,
        control_token: str,
        memory: Callable[[int], Memory] = host_memory,
        transports: Sequence[Transport] | None = None,
    ) -> None:
        self._settings = settings
        self._token = control_token
        self._given_transports = transports
        self._rt = NodeRuntime(
            settings,
            rank=rank,
            incarnation=incarnation,
            compatibility=compatibility,
            block_bytes=block_bytes,
            memory=memory,
            host=host_id(),
        )
        self._thread: threading.Thread | None = None
        self._listening = threading.Event()
        self._start_error: BaseException | None = None
        self._stop: asyncio.Event | None = None

    # -- life: any thread but the node's own -----------------------------------------------------------------------------

    def start(self) -> pb.RankEndpoint:
        """Start the thread. Returns when the node listens; called once.

        Raises:
            SplitpointError: INTERNAL, no configured transport can start here, or `advertise_host` does not lead here.
            OSError, RuntimeError: it cannot listen on `bind_host`.
        """
        if self._thread is not None:
            raise RuntimeError("the node was started before")
        self._thread = threading.Thread(target=self._run, name=f"kv-node-{self._rt.rank}", daemon=True)
        self._thread.start()
        if not self._listening.wait(START_TIMEOUT_S):
            raise TimeoutError(f"the node did not listen within {START_TIMEOUT_S:g} s")
        if self._start_error is not None:
            self._thread.join(STOP_TIMEOUT_S)
            raise self._start_error
        return self.endpoint

    def register(self, address: str, world_size: int) -> None:
        """Tell the worker's actor at `address` (host:port) how to reach this rank. Blocks until it has answered.

        Raises:
            SplitpointError: the actor refuses, or does not answer in time.
        """
        self._call(self._register(address, world_size))

    def stop(self) -> None:
        """End every transfer and the thread. Idempotent; safe after a failed `start`."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return
        stop = self._stop
        if stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop ended by itself meanwhile
                self._rt.loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_TIMEOUT_S)
        if thread.is_alive():
            raise RuntimeError(f"the node's thread did not end within {STOP_TIMEOUT_S:g} s")

    @property
    def endpoint(self) -> pb.RankEndpoint:
        """How peers and the actor reach this rank; complete after `start`."""
        endpoint = pb.RankEndpoint()
        endpoint.CopyFrom(self._rt.endpoint)
        return endpoint

    @property
    def transports(self) -> tuple[str, ...]:
        """Schemes that really started, in the order of the settings."""
        return tuple(self._rt.transports)

    def describe(self) -> dict[str, dict[str, str]]:
        """What each transport really uses."""
        return {scheme: transport.describe() for scheme, transport in self._rt.transports.items()}

    def metrics_text(self) -> bytes:
        """Prometheus exposition of this rank."""
        return self._rt.metrics.exposition()

    # -- the engine's thread: never blocking, never raising for an unknown transfer (rule 4) -----------------------------

    def send_view(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Memory | None:
        """Where the engine writes these blocks of its prompt: uint8 `[num_blocks, block_bytes]`, block-major.

        None: not reserved, released, beyond the reservation, or committed already. Whoever takes a view commits the same
        range, also when the request ended meanwhile: until then the slot's bytes cannot be used again.
        """
        rt = self._rt
        with rt.lock:
            lease = rt.leases.open_view(transfer_id, first_block, num_blocks)
            if lease is None:
                return None
            start = lease.slot.offset + first_block * rt.block_bytes
        if rt.shared is not None:
            rt.shared.touch(start, num_blocks * rt.block_bytes)
        return rt.send_memory[start : start + num_blocks * rt.block_bytes].reshape(num_blocks, rt.block_bytes)

    def commit_chunk(
        self,
        transfer_id: bytes,
        first_block: int,
        num_blocks: int,
        *,
        last: bool,
        ready: Callable[[], bool] | None = None,
        crcs: Any = None,
    ) -> None:
        """These blocks are written, or will be when `ready()` is True (a device event's query; if it has `wait()`, the node
        waits for it on a thread instead of asking again). `crcs`: what the gather computed of the staged bytes, final when they
        are: the CRC32C of each block in host memory, of each piece of these blocks on a device (kvtransfer/pieces.py).

        Chunks are committed in block order without gaps; `last` exactly with the prompt's last block. Anything else fails the
        transfer, which its receiver hears.
        """
        rt = self._rt
        with rt.lock:
            lease = rt.leases.live(transfer_id)
            if lease is not None and crcs is not None:
                lease.crcs.append((first_block, first_block + num_blocks, crcs))
            actions = rt.leases.commit(transfer_id, first_block, num_blocks, last=last, ready=ready, now=rt.now())
        rt.follow_from_engine(transfer_id, actions)

    def staged_blocks(self, transfer_id: bytes) -> int | None:
        """Blocks of a live lease committed so far: where a request that computes again goes on. None: no live lease."""
        with self._rt.lock:
            lease = self._rt.leases.live(transfer_id)
            return None if lease is None else lease.committed_blocks

    def staged(self, transfer_id: bytes) -> bool:
        """This transfer lies verified in receive staging. Looks without taking."""
        with self._rt.lock:
            session = self._rt.sessions.live(transfer_id)
            return session is not None and session.readable

    def verified_at(self, transfer_id: bytes) -> float | None:
        """When this live transfer was verified, monotonic seconds; None: it is not. For measurements."""
        with self._rt.lock:
            session = self._rt.sessions.live(transfer_id)
            return None if session is None else session.verified_at

    def receive_view(self, transfer_id: bytes) -> Memory | None:
        """The whole verified prompt, uint8 `[blocks, block_bytes]`, to be read only, or None. Its bytes stay until `scattered`,
        which whoever takes a view must call, also when the request ended meanwhile."""
        rt = self._rt
        with rt.lock:
            session = rt.sessions.take(transfer_id, rt.now())
            if session is None or session.hold is None:
                return None
            return session.view(rt.receive_memory).reshape(-1, rt.block_bytes)

    def scattered(self, transfer_id: bytes, *, ready: Callable[[], bool] | None = None) -> bool:
        """This rank is done with the slot, or will be when `ready()` is True, or never needed it. Repeating it is counted and
        changes nothing. False: the bytes lay with a sender that took this process for dead and may have written them again while
        they were read here, so what was read must not be used. (With `ready` they never lie there: it is of a device.)"""
        rt = self._rt
        if ready is not None:
            rt.scattered_when(transfer_id, ready)
            return True
        with rt.lock:
            intact = rt.sessions.intact(transfer_id)
            rt.sessions.scattered(transfer_id, rt.now())
        rt.follow_from_engine(transfer_id, ())
        return intact

    def take_observations(self) -> list[Observation]:
        """Ends of transfers since the last call, for the engine's own statistics."""
        return self._rt.metrics.take_observations()

    def counters(self) -> dict[str, int]:
        """Every event so far, by name."""
        return self._rt.counters()

    def status(self) -> pb.GetNodeStatusResponse:
        """What `GetNodeStatus` answers. Any thread."""
        return self._rt.status()

    # -- the node's own thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        use_device_of(self._rt.receive_memory)
        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(quiet_poller)
            try:
                runner.run(self._serve())
            except BaseException as exc:
                # Before listening this is start's to raise; afterwards there is nobody but the log.
                self._start_error = exc
                logger.exception("rank %d: the transfer node ended", self._rt.rank)
            finally:
                self._listening.set()

    async def _serve(self) -> None:
        rt = self._rt
        rt.bind()
        self._stop = asyncio.Event()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        try:
            await self._start_transports()
            transfers = KvTransferServicer(rt)
            transfers.serve_directly()
            transfers.add_to(server)
            control = KvControlServicer(rt, self._token)
            pb_grpc.add_KvControlServiceServicer_to_server(control, server)
            port = bind(server, host_port(self._settings.bind_host, 0), self._settings.tls)
            rt.endpoint.CopyFrom(self._make_endpoint(port))
            await server.start()
            await self._check_advertised()
            self._listening.set()
            await self._until_stopped()
        finally:
            for running in [*rt.pulls.values(), *rt.fetches.values()]:
                running.cancel()
            await server.stop(0.2)
            await rt.tasks.cancel_all()
            await rt.peers.close()
            for transport in rt.transports.values():
                await transport.stop()
            if rt.shared is not None:
                rt.shared.close()
            rt.executor.shutdown(wait=True)
            rt.waiters.shutdown(wait=True)

    async def _until_stopped(self) -> None:
        """Sweeps meanwhile. A node that ends nothing by its deadline would hold staging for ever, and one whose transport has
        ended cannot tell who touches it; so it ends with them: the worker's heartbeats find nobody listening, and the worker is
        replaced.

        Raises:
            SplitpointError: INTERNAL, a transport ended by itself.
        """
        assert self._stop is not None
        rt = self._rt
        stop = asyncio.create_task(self._stop.wait())
        sweep = asyncio.create_task(rt.sweep(), name="sweep")
        failures = {
            scheme: asyncio.create_task(transport.until_failed())
            for scheme, transport in rt.transports.items()
            if isinstance(transport, CanFail)
        }
        waited_for: list[asyncio.Task[Any]] = [stop, sweep, *failures.values()]
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if sweep.done():
                rt.metrics.event("sweep_ended")
                await sweep
            for scheme, failure in failures.items():
                if failure.done():
                    rt.metrics.event(f"transport_failed.{scheme}")
                    raise rt.remember(SplitpointError(Code.INTERNAL, f"transport {scheme}: {failure.result()}"))
        finally:
            for task in waited_for:
                task.cancel()
            await asyncio.gather(*waited_for, return_exceptions=True)

    async def _start_transports(self) -> None:
        rt = self._rt
        context = TransportContext(
            self._settings, rt.rank, rt.incarnation, rt.host_id, rt.send_memory, rt.receive_memory, rt.shared
        )
        made = self._given_transports
        schemes = to_open(self._settings) if made is None else [transport.scheme for transport in made]
        for left_out in [] if made is not None else [s for s in self._settings.transports if s not in schemes]:
            rt.metrics.event(f"transport_not_opened.{left_out}")
            logger.info("rank %d: transport %s is not opened: its UCX does not live beside that of the other", rt.rank, left_out)
        why = []
        started: dict[str, Transport] = {}
        for index, scheme in enumerate(schemes):
            try:
                transport = create_transport(scheme, context) if made is None else made[index]
                await transport.start()
            except (ImportError, TransportError) as exc:
                rt.metrics.event(f"transport_unavailable.{scheme}")
                logger.warning("rank %d: transport %s is not available: %s", rt.rank, scheme, exc)
                why.append(f"{scheme}: {exc}")
                continue
            started[scheme] = transport
            logger.info("rank %d: transport %s: %s", rt.rank, scheme, transport.describe())
        rt.transports.update((scheme, started[scheme]) for scheme in self._preferred(started))
        if not rt.transports:
            raise SplitpointError(Code.INTERNAL, f"no transport can start: {'; '.join(why)}")

    def _preferred(self, started: Mapping[str, Transport]) -> Sequence[str]:
        """The order in which this rank advertises its transports."""
        if self._settings.default_transport == "auto":
            return auto_order([reach_of(transport) for transport in started.values()])
        order = self._settings.transport_order
        return sorted(started, key=lambda scheme: order.index(scheme) if scheme in order else len(order))

    def _make_endpoint(self, port: int) -> pb.RankEndpoint:
        rt = self._rt
        ucx = rt.transports.get("ucx")
        held = holding(rt.compatibility)
        return pb.RankEndpoint(
            holding=None if held is None else held.to_proto(),
            rank=rt.rank,
            address=host_port(self._settings.advertise_host, port),
            host_id=rt.host_id,
            incarnation=rt.incarnation,
            ucx_worker_address=b"" if ucx is None else ucx.worker_address(),
            shared_staging=None if ucx is None or rt.shared is None else rt.shared.announcement,
            transport_addresses={s: t.worker_address() for s, t in rt.transports.items() if s != "ucx" and t.worker_address()},
        )

    async def _check_advertised(self) -> None:
        """Dial the address that peers will dial, and find this very process there."""
        rt = self._rt
        dialler = Peers(rt.compatibility, rt.fingerprint, self._settings.handshake_timeout_s, self._settings.tls)
        try:
            async with dialler.use(rt.endpoint):
                pass
        except SplitpointError as error:
            text = f"kvtransfer.advertise_host: {rt.endpoint.address} does not reach this rank: {error.message}"
            raise SplitpointError(Code.INTERNAL, text) from error
        finally:
            await dialler.close()

    async def _register(self, address: str, world_size: int) -> None:
        rt = self._rt
        request = worker_pb2.RegisterRankRequest(
            endpoint=rt.endpoint,
            compatibility=rt.compatibility,
            world_size=world_size,
            send_staging_bytes=rt.send.capacity_bytes,
            receive_staging_bytes=rt.receive.capacity_bytes,
            bytes_per_block=rt.block_bytes,
            transports=list(rt.transports),
        )
        async with channel(address, self._settings.tls, CHANNEL_OPTIONS) as connection:
            stub = worker_pb2_grpc.WorkerServiceStub(connection)
            try:
                await stub.RegisterRank(
                    request, metadata=control_metadata(self._token), timeout=REGISTER_TIMEOUT_S, wait_for_ready=True
                )
            except grpc.aio.AioRpcError as exc:
                raise from_rpc_error(exc) from exc

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the node's loop and wait for it on this thread."""
        return asyncio.run_coroutine_threadsafe(work, self._rt.loop).result()
