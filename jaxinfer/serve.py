"""The HTTP server: `python -m jaxinfer.serve --model=demo --port=8000`."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence

from jaxinfer import cli
from jaxinfer.flags import ServeOptions, serve_options


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 after SIGINT or SIGTERM and the end of the requests then running."""
    return cli.run(serve_options, _serve, argv)


def _serve(options: ServeOptions) -> int:
    # The port is taken first, so that one in use is told before the model is loaded.
    with _bind(options.host, options.port) as listener, cli.started(options.engine) as started:
        import uvicorn

        from jaxinfer.engine.async_engine import AsyncEngine
        from jaxinfer.server.app import create_app
        from jaxinfer.server.draining import DrainingServer

        engine = AsyncEngine(started, options.max_waiting_requests)
        started.on_lost_host(engine.fail)
        config = uvicorn.Config(
            create_app(engine, options.served_model_name),
            log_level="info" if options.verbosity >= 0 else "warning",
            ws="none",
        )
        server = DrainingServer(config, engine, options.shutdown_timeout_s)
        # uvicorn takes these signals while it runs and raises them again when it has drained: ignored
        # then, so that the process ends with 0.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        listener.listen()
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"serving {options.served_model_name} at http://{host}:{port}", file=sys.stderr, flush=True)
        server.run(sockets=[listener])
        return 0 if server.started else cli.FAILURE_STATUS


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address; raises CommandError where it cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise cli.CommandError(
            f"--host={host} cannot be resolved: {error.strerror}; give an address"
        ) from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        advice = "stop what listens there, or choose another with --port"
        raise cli.CommandError(f"cannot listen on {host} port {port}: {error.strerror}; {advice}") from error
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
