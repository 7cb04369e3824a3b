"""A small PTX machine in numpy: runs one program (thread block) of a compiled kernel, all threads at once, without a
GPU.

It knows the instructions that the quantizer's PTX consists of, checks every address against the buffers it was given,
and wants branches to be uniform. So a test on any machine sees what the kernel's source means: layouts, addresses,
masks, inline asm, tensor-core fragments, barriers aside. What ptxas then makes of it, only a GPU shows. ``div.full``
is computed as an exact division here.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

__all__ = ["PtxMachine"]

_WIDTH = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
_REGISTER = re.compile(r"[%A-Za-z_$][\w.$%]*$")


def _signed(kind: str) -> type:
    return {"16": np.int16, "32": np.int32, "64": np.int64}[kind]


class PtxMachine:
    """Holds the parsed code of the only kernel of a PTX text; ``run`` executes one program of its grid."""

    def __init__(self, ptx: str, threads: int = 256) -> None:
        self.threads = threads
        self.parameters = re.findall(r"\.param \.(\w+)[^,)]*?(\w+_param_\d+)", ptx)
        self._code: list[tuple[str | None, str, list[str]]] = []
        self._labels: dict[str, int] = {}
        body = ptx[ptx.index("\n{") + 2 :]
        for line in body.splitlines():
            text = line.split("//")[0].strip()
            label = re.match(r"(\$\w+):", text)
            if label:
                self._labels[label[1]] = len(self._code)
                continue
            text = text.strip("{} ;") if text.startswith(("{", "}")) else text.rstrip("; ")
            if not text or text.startswith((".", "$")):
                if text.startswith((".file", ".section")):
                    break
                continue
            guard = re.match(r"@(!?%?\w+)\s+", text)
            rest = text[guard.end() :] if guard else text
            opcode, _, operands = rest.partition(" ")
            self._code.append((guard[1] if guard else None, opcode.strip(), _split(operands.strip())))

    def run(
        self,
        program: tuple[int, int, int],
        grid: tuple[int, int, int],
        arguments: Sequence[int],
        buffers: Sequence[torch.Tensor],
    ) -> int:
        """Execute one program of the grid with the kernel's arguments; ``buffers`` are all the CPU tensors it may
        touch. Returns the steps taken."""
        self._segments = [(t.untyped_storage().data_ptr(), _bytes_of(t)) for t in buffers]
        self._shared = np.zeros(1 << 18, dtype=np.uint8)
        thread = np.arange(self.threads, dtype=np.uint32)
        self._registers: dict[str, np.ndarray] = {
            "%tid.x": thread,
            "global_smem": np.zeros(self.threads, dtype=np.uint64),
        }
        for axis, value, size in zip("xyz", program, grid, strict=True):
            self._registers[f"%ctaid.{axis}"] = np.full(self.threads, value, dtype=np.uint32)
            self._registers[f"%nctaid.{axis}"] = np.full(self.threads, size, dtype=np.uint32)
        self._arguments = {name: value for (_, name), value in zip(self.parameters, arguments, strict=False)}
        at = steps = 0
        with np.errstate(all="ignore"):
            while True:
                guard, opcode, operands = self._code[at]
                active = self._guard(guard)
                steps += 1
                at += 1
                if opcode == "ret":
                    return steps
                if opcode.startswith("bra"):
                    assert active.all() or not active.any(), "a branch is not uniform"
                    at = self._labels[operands[0]] if active.all() else at
                elif active.any():
                    self._execute(opcode.split("."), operands, active)

    # Operands

    def _guard(self, guard: str | None) -> np.ndarray:
        if guard is None:
            return np.ones(self.threads, dtype=bool)
        value = self._registers[guard.lstrip("!")].astype(bool)
        return ~value if guard.startswith("!") else value

    def _get(self, operand: str, kind: str) -> np.ndarray:
        """The operand's bits as the type named by the last part of an opcode, such as u32, f32 or pred."""
        bits = {"bf16": "16", "bf16x2": "32", "pred": "1"}.get(kind, kind[1:])
        if operand.startswith("{"):
            return self._pack(operand, bits)
        if operand.startswith("0f"):
            raw = np.full(self.threads, int(operand[2:], 16), dtype=np.uint32)
        elif _REGISTER.match(operand):
            raw = self._registers[operand]
        else:
            raw = np.full(self.threads, int(operand.rstrip("U"), 0) % (1 << 64), dtype=np.uint64)
        if kind == "pred":
            return raw.astype(bool)
        raw = raw.astype(_WIDTH[bits])
        return raw.view(np.float32) if kind == "f32" else raw.view(_signed(bits)) if kind[0] == "s" else raw

    def _pack(self, operand: str, bits: str) -> np.ndarray:
        parts = _split(operand.strip("{}"))
        each = int(bits) // len(parts)
        total = np.zeros(self.threads, dtype=np.uint64)
        for i, part in enumerate(parts):
            total |= self._get(part, f"b{each}").astype(np.uint64) << np.uint64(i * each)
        return total.astype(_WIDTH[bits])

    def _set(self, operand: str, value: np.ndarray, active: np.ndarray) -> None:
        if operand.startswith("{"):
            parts = _split(operand.strip("{}"))
            each = value.dtype.itemsize * 8 // len(parts)
            for i, part in enumerate(parts):
                piece = value.astype(np.uint64) >> np.uint64(i * each)
                self._set(part, piece.astype(_WIDTH[str(each)]), active)
            return
        if value.dtype == np.float32:
            value = value.view(np.uint32)
        elif value.dtype.kind == "i":
            value = value.view(value.dtype.str.replace("i", "u"))
        old = self._registers.get(operand)
        keep = np.zeros_like(value) if old is None else old.astype(value.dtype)
        self._registers[operand] = value if active.all() else np.where(active, value, keep)

    # Instructions

    def _execute(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        name, kind = parts[0], parts[-1]
        if name in ("ld", "st", "atom"):
            self._memory(parts, operands, active)
        elif name == "stmatrix":
            self._store_matrix(operands, active)
        elif name == "redux":
            self._set(operands[0], self._reduce(parts[2], self._get(operands[1], kind)), active)
        elif name == "mma":
            self._mma(operands, active)
        elif name == "setp":
            a, b = (self._get(operand, kind) for operand in operands[1:3])
            if kind == "bf16":
                a, b = (side.astype(np.uint32) << 16 for side in (a, b))
                a, b = a.astype(np.uint32).view(np.float32), b.astype(np.uint32).view(np.float32)
            self._set(operands[0], _COMPARE[parts[1]](a, b), active)
        elif name == "selp":
            choice = self._get(operands[3], "pred")
            self._set(operands[0], np.where(choice, self._get(operands[1], kind), self._get(operands[2], kind)), active)
        elif name == "cvt":
            self._set(operands[0], self._convert(parts, operands), active)
        elif name == "mov":
            self._set(operands[0], self._get(operands[1], kind), active)
        elif name == "shfl":
            source = self._get(operands[1], kind)
            self._set(operands[0], source[np.arange(self.threads) ^ int(operands[2])], active)
        elif name == "prmt":
            self._set(operands[0], self._permute(*operands[1:]), active)
        elif name == "bfe":
            value, start, length = (self._get(operand, "u32") for operand in operands[1:])
            self._set(operands[0], (value >> start) & ((np.uint32(1) << length) - np.uint32(1)), active)
        elif name in ("mul", "mad") and parts[1] in ("wide", "lo"):
            self._set(operands[0], self._multiply(parts, operands), active)
        elif name not in ("bar", "fence", "createpolicy"):
            values = [self._get(operand, kind) for operand in operands[1:]]
            self._set(operands[0], self._arithmetic(parts, kind, values), active)

    def _arithmetic(self, parts: list[str], kind: str, values: list[np.ndarray]) -> np.ndarray:
        name = parts[0]
        if name in ("max", "min") and kind == "f32":
            pick = np.maximum if "NaN" in parts else np.fmax
            return pick(*values) if name == "max" else np.fmin(*values)
        if name == "abs" and kind.startswith("bf16"):
            return values[0] & values[0].dtype.type(0x7FFF7FFF)
        if name in ("div", "rem") and kind[0] != "f":
            a, b = values
            quotient = np.where((a < 0) != (b < 0), -(abs(a) // abs(b)), abs(a) // abs(b)).astype(a.dtype)
            return quotient if name == "div" else a - quotient * b
        if name in ("shl", "shr"):
            return _SIMPLE[name](values[0], values[1].astype(values[0].dtype))
        return _SIMPLE[name](*values)

    def _multiply(self, parts: list[str], operands: list[str]) -> np.ndarray:
        kind = parts[-1]
        a, b = (self._get(operand, kind) for operand in operands[1:3])
        if parts[1] == "wide":
            wide = np.int64 if kind[0] == "s" else np.uint64
            product = a.astype(wide) * b.astype(wide)
            return product + self._get(operands[3], f"{kind[0]}64") if parts[0] == "mad" else product
        return a * b + self._get(operands[3], kind) if parts[0] == "mad" else a * b

    def _convert(self, parts: list[str], operands: list[str]) -> np.ndarray:
        target, source = parts[-2], parts[-1]
        if target == "e4m3x2":
            high, low = (_e4m3(self._get(operand, "f32")) for operand in operands[1:3])
            return low | high << np.uint16(8)
        value = self._get(operands[1], source)
        if source == "bf16":
            return (value.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if target == "f32":
            return value.astype(np.float32)
        if source == "f32":
            return value.astype(_signed(target[1:]))  # truncation, as cvt.rzi
        return value.astype(_signed(target[1:]) if target[0] == "s" else _WIDTH[target[1:]])

    def _permute(self, first: str, second: str, selector: str) -> np.ndarray:
        both = self._get(first, "u32").astype(np.uint64) | self._get(second, "u32").astype(np.uint64) << np.uint64(32)
        chosen = int(selector.rstrip("U"), 0)
        result = np.zeros(self.threads, dtype=np.uint64)
        for i in range(4):
            byte = both >> np.uint64(8 * (chosen >> 4 * i & 7)) & np.uint64(255)
            result |= byte << np.uint64(8 * i)
        return result.astype(np.uint32)

    def _mma(self, operands: list[str], active: np.ndarray) -> None:
        """m16n8k32, u8 x u8 -> s32, with the fragments of the PTX ISA."""
        assert active.all()
        target, left, right, start = (_split(operand.strip("{}")) for operand in operands)
        a = (
            np.stack([self._get(r, "u32") for r in left], 1).reshape(-1, 8, 4, 4, 1).view(np.uint8)
        )  # warp, g, t, register, byte
        b = np.stack([self._get(r, "u32") for r in right], 1).reshape(-1, 8, 4, 2, 1).view(np.uint8)
        c = np.stack([self._get(r, "u32") for r in start], 1).view(np.int32)
        # Registers 0 and 2 are row g, 1 and 3 row g + 8; 0 and 1 the first 16 columns, 2 and 3 the others.
        rows = np.concatenate([a[:, :, :, 0::2], a[:, :, :, 1::2]], axis=1).astype(np.int64)  # warp, row, t, half, byte
        product = np.einsum("wrthb,wnthb->wrn", rows, b.astype(np.int64))
        warp, lane = np.divmod(np.arange(self.threads), 32)
        group, member = np.divmod(lane, 4)
        for i, register in enumerate(target):
            value = product[warp, group + 8 * (i // 2), 2 * member + i % 2] + c[:, i]
            self._set(register, value.astype(np.int32), active)

    def _store_matrix(self, operands: list[str], active: np.ndarray) -> None:
        """stmatrix x1: lane 4 r + i of a warp holds bytes 4 i to 4 i + 3 of row r, whose address lane r gives."""
        assert active.all()
        thread = np.arange(self.threads)
        row = self._address(operands[0])[thread // 32 * 32 + thread % 32 // 4].astype(np.int64)
        place = (row + thread % 4 * 4)[:, None] + np.arange(4)
        self._shared[place] = self._get(operands[1].strip("{} "), "u32").view(np.uint8).reshape(-1, 4)

    def _reduce(self, operation: str, values: np.ndarray) -> np.ndarray:
        warps = values.reshape(-1, 32)
        reduced = {"max": warps.max(1), "add": warps.sum(1, dtype=values.dtype)}[operation]
        return np.repeat(reduced, 32)

    def _address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").partition("+")
        return self._get(base.strip(), "u64") + np.uint64(int(offset or "0"))

    def _memory(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        size = int(re.sub(r"\D", "", parts[-1])) // 8
        if parts[1] == "param":
            self._set(
                operands[0],
                np.full(self.threads, self._arguments[operands[1].strip("[]")] % (1 << 64), np.uint64),
                active,
            )
            return
        place = operands[0] if parts[0] == "st" else operands[1]
        address = self._address(place)
        values = operands[1] if parts[0] == "st" else operands[0]
        registers = _split(values.strip("{} ")) if values.startswith("{") else [values]
        if parts[0] == "atom":
            operate = {"min": np.minimum, "add": np.add}[parts[-2]]
            for lane in np.flatnonzero(active):
                memory, start = self._find(parts[1], address[lane : lane + 1], size)
                cell = memory[start[0] : start[0] + size].view(np.int64)
                cell[0] = operate(cell[0], self._get(operands[2], "s64")[lane])
            return
        for i, register in enumerate(registers):
            memory, start = self._find(parts[1], address[active] + np.uint64(i * size), size)
            index = start[:, None] + np.arange(size)
            if parts[0] == "st":
                memory[index] = self._get(register, f"b{8 * size}")[active].view(np.uint8).reshape(-1, size)
            else:
                loaded = np.zeros(self.threads, dtype=_WIDTH[str(8 * size)])
                loaded[active] = memory[index].reshape(-1).view(loaded.dtype)
                self._set(register, loaded, active)

    def _find(self, space: str, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        if space == "shared":
            return self._shared, address.astype(np.int64)
        low, high = int(address.min()), int(address.max()) + size
        for base, memory in self._segments:
            if base <= low and high <= base + memory.size:
                return memory, (address - np.uint64(base)).astype(np.int64)
        raise AssertionError(f"addresses {low:#x}..{high:#x} lie in no buffer")


def _split(text: str) -> list[str]:
    """Comma-separated operands, those in braces or brackets whole."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if part.strip()]


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def _e4m3(values: np.ndarray) -> np.ndarray:
    codes = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(np.isnan(values), np.uint8(0x7F), codes).astype(np.uint16)


_COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal, "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
}  # fmt: skip
_SIMPLE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "abs": np.abs, "max": np.maximum,
    "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": np.left_shift, "shr": np.right_shift, "neg": np.negative,
}  # fmt: skip
