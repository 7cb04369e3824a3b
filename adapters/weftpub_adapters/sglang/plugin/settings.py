"""What a driver asks of the workers of one engine, as a file in the owner-only folder of their sockets.

SGLang's control calls only name the folder. What is in the file counts, and it counts only if the folder and the file
belong to the user that runs the engine: whoever can reach the server's HTTP port, but not its files, starts nothing.
"""

import os
import stat
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weftpub.channel import CurveKeys, unix_address
from weftpub.channel.address import check_address
from weftpub.errors import ChannelError, ConfigError
from weftpub.wire.messages import RUN_ID_PATTERN

__all__ = ["BACKEND", "STANDING", "ReceiverSettings", "TcpSettings"]

# What a driver gives as `backend` of SGLang's init_weights_update_group: to start receivers, and to ask the schedulers
# whether they compute requests.
BACKEND = "weftpub"
STANDING = "weftpub-standing"
_FILE = "receivers.json"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$"
_LARGEST = 1 << 16


class TcpSettings(BaseModel):
    """Where the workers of an engine listen whose publisher leads it from another host.

    Attributes:
        host: this host's name or address there.
        public, secret: the receivers' CURVE keys.
        admitted: public keys of the trainer ranks that may connect.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: str = Field(pattern=r"^[A-Za-z0-9\[][A-Za-z0-9.:\-\]]{0,254}$")
    public: str = Field(min_length=40, max_length=40)
    secret: str = Field(min_length=40, max_length=40, repr=False)
    admitted: tuple[str, ...] = Field(min_length=1)

    @property
    def keys(self) -> CurveKeys:
        """For the receivers' sockets."""
        return CurveKeys(self.public, self.secret, self.admitted)


class ReceiverSettings(BaseModel):
    """How the workers of one engine serve their receivers.

    Attributes:
        run_id: the run whose publishers they listen to.
        engine: name of the engine.
        first_rank: receiver rank of the engine's first worker.
        version: the published version that the engine was loaded with, None if it holds none.
        silence: seconds without a word in the middle of a publish after which its publisher is taken for dead.
        pause: seconds that a worker may take to come to rest once its scheduler was told to pause.
        tcp: None: they listen on Unix sockets in the folder.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str = Field(pattern=RUN_ID_PATTERN)
    engine: str = Field(pattern=_NAME)
    first_rank: int = Field(default=0, ge=0)
    version: int | None = Field(default=None, ge=0)
    silence: float = Field(default=180.0, gt=0)
    pause: float = Field(default=10.0, gt=0)
    tcp: TcpSettings | None = None

    @classmethod
    def checked(cls, **fields: object) -> "ReceiverSettings":
        """Settings; ConfigError names the field that cannot work."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"]))
            raise ConfigError(f"receiver settings: {where}: {fault['msg']}, found {fault['input']!r}") from None

    def address(self, directory: str | os.PathLike[str], rank: int) -> str:
        """Where the worker with this receiver rank listens; makes or checks the folder. A port of TCP is chosen when it
        does.
        """
        own = unix_address(directory, f"{self.engine}-{rank}")
        return own if self.tcp is None else f"tcp://{self.tcp.host}:0"

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Put the file into the folder, which is made if it is not there; ChannelError if it cannot be trusted."""
        self.address(directory, self.first_rank)
        target = Path(directory) / _FILE
        temporary = target.with_name(f".{_FILE}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self.model_dump_json())
        os.replace(temporary, target)

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> "ReceiverSettings":
        """The settings in a folder; ChannelError if folder or file belong to somebody else, or hold something else."""
        path = Path(directory).absolute() / _FILE
        check_address(f"ipc://{path}", None)  # makes nothing: the name of the folder came through SGLang's own doors
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
                facts = os.fstat(file.fileno())
                text = file.read(_LARGEST)
        except (OSError, UnicodeDecodeError) as error:
            raise ChannelError(f"{path}: receiver settings cannot be read: {error}") from error
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o022:
            raise ChannelError(
                f"{path}: belongs to user {facts.st_uid} with mode {stat.S_IMODE(facts.st_mode):o}, expected a file of "
                f"user {os.getuid()} that nobody else writes; run driver and engine as one user"
            )
        try:
            settings = cls.model_validate_json(text)
        except ValidationError as error:
            raise ChannelError(f"{path}: not receiver settings ({error.error_count()} faults)") from None
        if settings.tcp is not None and stat.S_IMODE(facts.st_mode) & 0o077:
            raise ChannelError(
                f"{path}: holds a secret key and has mode {stat.S_IMODE(facts.st_mode):o}, expected 600; start the "
                "receivers anew, with new keys"
            )
        return settings
