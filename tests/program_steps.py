"""Draws random programs for the oracle of `programs`: a catalogue of lines, drawn while the dense side runs along.

`draw_program(seed)` gives a mesh and lines. A kind of line is a function that returns its text, or None where no tensor
fits. To add one: a function, and its line in `KINDS` with how often it comes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from random import Random

import torch

from oracle import partial_ops
from programs import BOOKKEEPING, DTYPES, Dense, defined_by, is_expanded, is_readable, storage_of

MESHES = (
    *[(1,), (2,), (2,), (3,), (4,), (5,), (8,), (16,)] * 2,
    *[(2, 1), (2, 2), (2, 2), (2, 3), (3, 2), (2, 4), (2, 4), (1, 3), (4, 4)] * 2,
    (2, 2, 2), (2, 3, 2), (1, 2, 3), (4, 2, 2),
)  # fmt: skip
SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 10)
LARGEST = 1e4  # values beyond it are not made: their rounding would hide what is compared
MOST = 400  # elements of a tensor


class Drawing:
    """A program under way: its lines, and the dense tensors that they made."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.mesh: tuple[int, ...] = self.pick(MESHES)
        self.sizes = [self.pick(SIZES) for _ in range(3)]
        self.dense = Dense()
        self.lines: list[str] = []
        self.count = 0

    def pick(self, values: Sequence) -> object:  # type: ignore[type-arg]
        return self.random.choice(values)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    @property
    def live(self) -> dict[str, torch.Tensor]:
        named = ((name, value) for name, value in self.dense.names.items() if name[0] == "v" and name[1:].isdigit())
        return {name: value for name, value in named if is_readable(value)}

    def find(self, fits: Callable[[torch.Tensor], bool] = lambda _: True) -> str | None:
        """A tensor that fits; newer ones rather."""
        found = [name for name, value in self.live.items() if fits(value)]
        return self.pick(found[-5:] if self.chance(0.6) else found) if found else None

    def value(self, name: str) -> torch.Tensor:
        return self.dense.names[name]

    def new(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def seed(self) -> int:
        return self.random.randrange(1000)

    def placements(self, shape: tuple[int, ...], dtype: torch.dtype, partial: float = 0.15) -> str:
        """What each mesh axis does; one kind of reduction per tensor."""
        op = self.pick(partial_ops(dtype))
        found = []
        for _ in self.mesh:
            kind = self.random.random()
            if kind < partial:
                found.append(f"P({op})")
            elif kind < 0.75 and shape:
                found.append(f"S({self.random.randrange(len(shape))})")
            else:
                found.append("R")
        return ", ".join(found)

    def add(self, line: str) -> None:
        """Run a line on the dense side and keep it, unless it breaks autograd's books or its values are too large."""
        error = self.dense.run(line)
        if error is not None:
            if isinstance(error, (SyntaxError, NameError)):
                raise error
            if any(text in str(error) for text in BOOKKEEPING):
                return
        new = defined_by(line)
        if any(isinstance(self.dense.names.get(name), torch.Tensor) and is_large(self.value(name)) for name in new):
            for name in new:
                del self.dense.names[name]
            return
        self.lines.append(line)


def is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() > MOST or size_of(tensor) > LARGEST


def size_of(tensor: torch.Tensor) -> float:
    """The largest magnitude; infinite where it is not a number."""
    if not tensor.numel() or tensor.dtype == torch.bool:
        return 0.0
    found = float(tensor.detach().abs().max())
    return found if found == found else float("inf")


def is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def is_number(tensor: torch.Tensor) -> bool:
    return tensor.dtype != torch.bool


def is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool


def has_dims(tensor: torch.Tensor) -> bool:
    return tensor.ndim > 0


def of_one(
    fits: Callable[[torch.Tensor], bool] = lambda _: True, find: Callable[..., str | None] = Drawing.find
) -> Callable[[Callable[..., str | None]], Callable[[Drawing], str | None]]:
    """A kind of line that begins with one tensor that fits: it gets the tensor's name and value."""

    def decorate(line: Callable[..., str | None]) -> Callable[[Drawing], str | None]:
        @wraps(line)
        def draw(d: Drawing) -> str | None:
            name = find(d, fits)
            return None if name is None else line(d, name, d.value(name))

        return draw

    return decorate


def leaf(d: Drawing) -> str:
    ndim = d.pick((0, 1, 1, 2, 2, 2, 2, 3))
    shape = tuple(d.pick(d.sizes) if d.chance(0.9) else 1 for _ in range(ndim))
    if torch.Size(shape).numel() > MOST:
        shape = shape[:2]
    dtype = d.pick(("f64", "f64", "f64", "f32", "f32", "i64", "bool"))
    tracked = ", tracked=True" if dtype[0] == "f" and d.chance(0.75) else ""
    return f'{d.new()} = leaf({shape}, "{dtype}", "{d.placements(shape, DTYPES[dtype])}", {d.seed()}{tracked})'


# Pointwise.


@of_one(is_number)
def unary(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    floats = "neg abs relu tanh sigmoid square sin cos exp clone sgn"
    function = d.pick((floats if is_float(value) else "neg abs square clone sgn").split())
    if function in ("exp", "square") and size_of(value) > 8:
        return None
    return f"{d.new()} = {d.pick((f'{name}.{function}()', f'torch.{function}({name})'))}"


@of_one(is_number)
def number(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    floats = (
        "{} * 0.5",
        "{} / 4",
        "{} - 0.25",
        "2.5 - {}",
        "{}.clamp(-1.1, 1.1)",  # no drawn value is a bound: parts that are equal there would share a gradient
        "{}.clamp_min(0.55)",
        "{} ** 2",
        "1 - {}",
    )
    integers = ("{} * 2", "{} + 1", "3 - {}", "{} // 2", "{} % 3", "{}.clamp(-1, 1)", "{} / 2", "{} * 0.5")
    form = d.pick(floats if is_float(value) else integers)
    return None if "**" in form and size_of(value) > 50 else f"{d.new()} = {form.format(name)}"


def broadcasts(first: torch.Tensor, second: torch.Tensor) -> bool:
    pairs = zip(reversed(first.shape), reversed(second.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def partner(d: Drawing, name: str, fits: Callable[[torch.Tensor], bool] = is_number) -> str | None:
    """A tensor that broadcasts with another."""
    return d.find(lambda other: fits(other) and broadcasts(other, d.value(name)))


def binary(d: Drawing) -> str | None:
    name = d.find(is_number)
    other = name and partner(d, name)
    if name is None or other is None:
        return None
    if d.chance(0.15):
        other = f"plain({tuple(d.value(other).shape)}, {'f64' if is_float(d.value(other)) else 'i64'!r}, {d.seed()})"
        other = other.replace("'", '"')
    elif size_of(d.value(name)) * size_of(d.value(other)) > LARGEST:
        return f"{d.new()} = {name} + {other}"
    functions = (
        "{} + {}",
        "{} - {}",
        "{} * {}",
        "torch.add({}, {}, alpha=2)",
        "torch.maximum({}, {})",
        "{}.minimum({})",
    )
    return f"{d.new()} = {d.pick(functions).format(name, other)}"


@of_one(is_number)
def compare(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    bound = "0.3" if is_float(value) else "0"
    return f"{d.new()} = {name} {d.pick(('>', '<', '>=', '<='))} {bound}"


def logic(d: Drawing) -> str | None:
    name = d.find(is_mask)
    other = name and partner(d, name, is_mask)
    if name is None:
        return None
    forms = ["~{}", "{}.long()", "{}.double()", "{} & {}", "{} | {}", "{} ^ {}"]
    return f"{d.new()} = {d.pick(forms).format(name, other)}"


def where(d: Drawing) -> str | None:
    mask = d.find(is_mask)
    name = mask and partner(d, mask)
    other = name and d.find(lambda value: broadcasts(value, d.value(name)) and broadcasts(value, d.value(mask)))
    if not other:
        return None
    forms = ("torch.where({0}, {1}, {2})", "{1}.where({0}, {2})", "{1}.masked_fill({0}, 2)", "torch.where({0}, {1}, 0)")
    return f"{d.new()} = {d.pick(forms).format(mask, name, other)}"


def cast(d: Drawing) -> str | None:
    name = d.find()
    return name and f"{d.new()} = {name}{d.pick(('.double()', '.float()', '.to(torch.float64)', '.clone()', ' != 0'))}"


# Contractions and reductions.


@of_one(lambda value: is_float(value) and value.ndim >= 1 and size_of(value) < 50)
def matmul(d: Drawing, name: str, value: torch.Tensor) -> str | None:

    def fits(other: torch.Tensor) -> bool:
        inner = other.ndim and other.shape[-2 if other.ndim > 1 else 0] == value.shape[-1]
        return bool(inner) and other.dtype == value.dtype and size_of(other) < 50 and max(other.ndim, value.ndim) < 4

    other = d.find(fits)
    if other is not None:
        return f"{d.new()} = {name} @ {other}"
    if value.ndim < 2:
        return f"{d.new()} = torch.outer({name}, {name})" if d.chance(0.3) else None
    turned = d.find(lambda other: other.ndim == 2 and other.dtype == value.dtype and other.shape[-1] == value.shape[-1])
    if turned is not None and d.chance(0.5):
        return f"{d.new()} = F.linear({name}, {turned})"
    return f"{d.new()} = {d.pick((f'{name} @ {name}.mT', f'{name}.mT @ {name}', name + '.matmul(' + name + '.mT)'))}"


@of_one(is_float)
def reduce(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    small = size_of(value) < 4 and value.numel() < 30
    functions = "sum mean amax amin logsumexp" + " prod" * small
    if not value.ndim:
        return f"{d.new()} = {name}.{d.pick(('sum', 'mean', 'amax'))}()"
    dim = d.random.randrange(-value.ndim, value.ndim)
    if d.chance(0.2):
        return f"{d.new()} = {name}.{d.pick(('sum', 'mean', 'amax', 'amin') if value.numel() else ('sum',))}()"
    if d.chance(0.2) and value.ndim > 1:
        return f"{d.new()} = {name}.{d.pick(('sum', 'mean', 'amax'))}({tuple(range(value.ndim))[-2:]})"
    if not value.shape[dim]:
        functions = "sum"
    keep = d.pick(("", "", ", keepdim=True"))
    return f"{d.new()} = {name}.{d.pick(functions.split())}({dim}{keep})"


@of_one(lambda value: is_float(value) and value.ndim > 0)
def along(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    dim = d.random.randrange(-value.ndim, value.ndim)
    last = f"F.layer_norm({name}, ({value.shape[-1]},))"
    forms = (
        f"{name}.cumsum({dim})",
        f"{name}.softmax({dim})",
        f"F.log_softmax({name}, {dim})",
        f"{name}.flip({dim})",
        f"{name}.roll(1, {dim})",
        last,
        f"F.normalize({name} + 4, dim={dim})",
        f"{name}.var({dim}, correction=0)",
        f"{name}.sort({dim}).values",
        f"F.pad({name}, (1, 2))",
        f"torch.cumsum({name}, {dim})",
    )
    form = d.pick(forms)
    return None if not value.shape[dim] and "cumsum" not in form else f"{d.new()} = {form}"


@of_one(lambda value: not is_float(value))
def integers(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    if not value.numel() or not value.ndim:
        return f"{d.new()} = {name}.sum()"
    dim = d.random.randrange(value.ndim)
    forms = (
        f"{name}.sum({dim})",
        f"{name}.any({dim})",
        f"{name}.all()",
        f"{name}.sum()",
        f"{name}.amax({dim})",
        f"{name}.count_nonzero({dim})",
        f"{name}.cumsum({dim})",
    )
    return f"{d.new()} = {d.pick(forms)}"


@of_one(has_dims)
def join(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    other = d.find(lambda each: each.shape == value.shape)
    dim = d.random.randrange(-value.ndim, value.ndim)
    return f"{d.new()} = torch.{d.pick(('cat', 'stack'))}([{name}, {other}], {dim})"


@of_one(lambda value: value.ndim > 0 and value.numel() > 0)
def look_up(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    dim = d.random.randrange(value.ndim)
    rows = [d.random.randrange(value.shape[dim]) for _ in range(d.pick((1, 2, 3)))]
    forms = [
        f"{name}.index_select({dim}, torch.tensor({rows}))",
        f"{name}[{':, ' * dim}{rows}]",
        f"{name}[{':, ' * dim}torch.tensor({rows})]",
        f"{name}.tril()" if value.ndim > 1 else f"{name}.repeat(2)",
        f"{name}.repeat_interleave(2, {dim})",
    ]
    mask = d.find(lambda each: is_mask(each) and each.shape == value.shape)
    forms += [f"{name}[{mask}]"] if mask is not None else []
    return f"{d.new()} = {d.pick(forms)}"


# Views.


def index_of(d: Drawing, shape: Sequence[int]) -> str:
    """An index of ints, slices, None and an ellipsis that fits."""
    parts = []
    for size in shape[: d.random.randrange(1, len(shape) + 1)] if shape else ():
        start, stop, at = d.random.randrange(size + 1), d.random.randrange(size + 1), d.random.randrange(max(size, 1))
        forms = [":", f"{start}:", f":{stop}", f"{min(start, stop)}:{max(start, stop)}", "::2", "-2:"]
        parts.append(d.pick((*forms, *[str(at - size * d.chance(0.3))] * 3 * (size > 0))))
    if d.chance(0.1):
        parts.insert(0, "...") if len(parts) == len(shape) else parts.append("...")
    if d.chance(0.1):
        parts.insert(d.random.randrange(len(parts) + 1), "None")
    return ", ".join(parts) or "..."


def index(d: Drawing) -> str | None:
    name = d.find(has_dims)
    return name and f"{d.new()} = {name}[{index_of(d, d.value(name).shape)}]"


def shapes_of(count: int) -> list[tuple[int, ...]]:
    """Shapes of so many elements."""
    pairs = [(a, count // a) for a in range(1, count + 1) if count % a == 0] if count else [(0, 3), (0,), (2, 0)]
    return [(count,), (-1,), *pairs] if count else pairs


@of_one()
def view(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    function = d.pick(("view", "view", "reshape"))
    if not value.is_contiguous():  # torch copies or refuses, by strides that a mesh does not have
        function = "clone().reshape"
    shape = d.pick(shapes_of(value.numel()))
    return f"{d.new()} = {name}.{function}({', '.join(map(str, shape))})"


@of_one(has_dims)
def turn(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    n = value.ndim
    dims = list(range(n))
    a, b = d.random.randrange(-n, n), d.random.randrange(n)
    order = d.random.sample(dims, n)
    forms = [
        f"transpose({a}, {b})",
        f"permute({', '.join(map(str, order))})",
        f"unsqueeze({a})",
        f"movedim({a}, {b})",
        f"squeeze({a})",
        "detach()",
        f"view_as({name})",
        f"swapaxes({a}, {b})",
    ]
    forms += ["mT", "diagonal()", "diagonal(1)", "diagonal(-1, 0, 1)"] if n > 1 else []
    forms += ["T"] if n == 2 else []
    forms += ["flatten()", "ravel()"] if value.is_contiguous() and n > 1 else []
    return f"{d.new()} = {name}.{d.pick(forms)}"


@of_one(lambda value: value.numel() < 60 and value.ndim < 3)
def expand(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    shape = [d.pick((2, 3)) if size == 1 and d.chance(0.6) else size for size in value.shape]
    shape = [d.pick((1, 2, 3)), *shape] if d.chance(0.5) else shape
    return f"{d.new()} = {name}.expand({tuple(shape)})"


@of_one(lambda value: value.ndim > 0 and value.numel() > 0)
def cut(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    dim = d.random.randrange(value.ndim)
    size = value.shape[dim]
    start = d.random.randrange(size)
    if d.chance(0.4):
        length = d.random.randrange(size - start + 1)
        forms = (f"narrow({dim}, {start}, {length})", f"select({dim}, {start})", f"unfold({dim}, {min(2, size)}, 1)")
        return f"{d.new()} = {name}.{d.pick(forms)}"
    form = d.pick((f"unbind({dim})", f"chunk(2, {dim})", f"split(2, {dim})", f"tensor_split(2, {dim})"))
    parts = eval(f"value.{form}")
    if len(parts) > 4:
        return f"{d.new()} = {name}.{form}[{start % len(parts)}]"
    return f"{', '.join(d.new() for _ in parts)}{',' * (len(parts) == 1)} = {name}.{form}"


@of_one(lambda value: value.dtype in (torch.float64, torch.int64, torch.float32) and not value.requires_grad)
def retype(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    held = value.dtype
    wanted = {torch.float64: "int64", torch.int64: "float64", torch.float32: "int32"}[held]
    return f"{d.new()} = {name}.view(torch.{wanted})"


# Writes.


def target(d: Drawing, fits: Callable[[torch.Tensor], bool] = lambda _: True) -> str | None:
    return d.find(lambda value: fits(value) and not (is_expanded(value) and d.chance(0.9)))


@of_one(is_number, find=target)
def write_number(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    calm = size_of(value) < 100
    floats = [
        "add_(0.5)",
        "sub_(0.25)",
        "clamp_(-1.1, 1.1)",
        "clamp_(min=-0.55)",
        "fill_(0.75)",
        "zero_()",
        "relu_()",
        "tanh_()",
        "neg_()",
        "abs_()",
        "sigmoid_()",
        "div_(2)",
    ]
    integers = ["add_(1)", "sub_(2)", "clamp_(-1, 1)", "fill_(3)", "zero_()", "neg_()", "abs_()"]
    forms = (floats if is_float(value) else integers) + ["mul_(-2)", "mul_(2)"] * calm
    if value.ndim and calm:
        forms.append(f"cumsum_({d.random.randrange(value.ndim)})")
    if d.chance(0.1):
        return f"{name} {d.pick(('+=', '-=', '*='))} 2" if calm else None
    return f"{name}.{d.pick(forms)}"


def source(d: Drawing, name: str, shape: Sequence[int] | None = None) -> str | None:
    """A tensor that broadcasts into another's shape and is not a view of it, for which torch has no rule."""
    into = d.value(name)
    wanted = torch.empty(tuple(into.shape if shape is None else shape))

    def fits(other: torch.Tensor) -> bool:
        held = torch.can_cast(other.dtype, into.dtype)
        apart = other is into or storage_of(other) != storage_of(into)
        return (
            held
            and apart
            and other.ndim <= wanted.ndim
            and broadcasts(other, wanted)
            and is_number(other)
            and reaches(other)
        )

    def reaches(other: torch.Tensor) -> bool:
        return all(a in (1, b) for a, b in zip(reversed(other.shape), reversed(wanted.shape), strict=False))

    return d.find(fits)


def write_tensor(d: Drawing) -> str | None:
    name = target(d, is_number)
    other = name and source(d, name)
    if name is None or other is None:
        return None
    calm = size_of(d.value(name)) * size_of(d.value(other)) < 1000
    forms = ["add_({})", "sub_({})", "copy_({})", "copy_({})"] + ["mul_({})"] * calm
    if d.value(other).dtype == d.value(name).dtype and is_float(d.value(name)):
        forms += (
            ["lerp_({}, 0.5)", "addcmul_({0}, {0}, value=0.125)"] if d.value(other).shape == d.value(name).shape else []
        )
    return f"{name}.{d.pick(forms).format(other)}"


@of_one(find=target)
def write_item(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    where = index_of(d, value.shape)
    taken = eval(f"value[{where}]")
    other = None if d.chance(0.4) or not is_number(value) else source(d, name, taken.shape)
    content = other or {torch.bool: "True", torch.int64: "5", torch.int32: "5"}.get(value.dtype, "1.5")
    return f"{name}[{where}] = {content}"


def write_mask(d: Drawing) -> str | None:
    name = target(d, is_number)
    mask = name and d.find(lambda other: is_mask(other) and other.shape == d.value(name).shape)
    if name is None:
        return None
    if mask is None:
        mask = f"{name} > 0" if not is_float(d.value(name)) else f"{name} > 0.3"
    content = "1.5" if is_float(d.value(name)) else "4"
    forms = (
        f"{name}[{mask}] = {content}",
        f"{name}.masked_fill_({mask}, {content})",
        f"{name}[{mask}] *= 0",
        f"{name}.masked_fill_({mask}, 0)",
    )
    return d.pick(forms)


@of_one(lambda value: value.ndim > 0 and value.numel() > 0 and is_number(value), find=target)
def write_rows(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    dim = d.random.randrange(value.ndim)
    rows = d.random.sample(range(value.shape[dim]), min(value.shape[dim], d.pick((1, 2))))
    shape = tuple(len(rows) if each == dim else size for each, size in enumerate(value.shape))
    dtype = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64", torch.int32: "i32"}[value.dtype]
    content = f'plain({shape}, "{dtype}", {d.seed()})'
    index = f"torch.tensor({rows})"
    tall = ", ".join("-1" if each == dim else "1" for each in range(value.ndim))
    wide = f"torch.tensor({rows}).view({tall}).expand({shape})"
    forms = [
        f"{name}.index_fill_({dim}, {index}, 2)",
        f"{name}.index_add_({dim}, {index}, {content})",
        f"{name}.index_copy_({dim}, {index}, {content})",
        f"{name}.scatter_({dim}, {wide}, {content})",
        f"{name}.scatter_add_({dim}, {wide}, {content})",
        f"{name}.scatter_({dim}, {wide}, 2)",
    ]
    if dim == 0:
        forms += [f"{name}.index_put_(({index},), {content})", f"{name}[{rows}] = {content}", f"{name}[{index}] = 2"]
        forms += [f"{name}.index_put_(({index},), {content}, accumulate=True)"]
    return d.pick(forms)


# Hooks, requests, refusals, backward.


def hook(d: Drawing) -> str | None:
    # torch itself crashes at a hook on a view whose base was written from another view of it
    name = d.find(lambda value: value.requires_grad and (value._base is None or not value._version))
    kind = d.pick(("scale(2.0)", "scale(-0.5)", "record({!r})", "record({!r})")).format(f"{name} {len(d.lines)}")
    return name and f"keep({name}.register_hook({kind}))".replace("'", '"')


def place(d: Drawing) -> str | None:
    name = d.find()
    return name and f'{d.new()} = place({name}, "{d.placements(tuple(d.value(name).shape), d.value(name).dtype)}")'


def request(d: Drawing) -> str | None:
    """A call that asks for placements; on three axes planning one takes long."""
    name = d.find(is_float)
    other = name and partner(d, name)
    if name is None or other is None or (len(d.mesh) > 2 and d.chance(0.9)):
        return None
    value, dim = d.value(name), -1
    calls = [
        ("add", (name, other)),
        ("mul", (name, other)),
        ("neg", (name,)),
        ("relu", (name,)),
        ("sub", (name, other)),
        ("mul", (name, "0.5")),
        ("sum", (name,)),
    ]
    if value.ndim and value.shape[dim]:
        calls += [("sum", (name, "-1")), ("amax", (name, "-1")), ("mean", (name, "0")), ("softmax", (name, "-1"))]
    if value.ndim == 2 and size_of(value) < 50:
        calls += [("matmul", (name, f"{name}.mT")), ("permute", (name, "(1, 0)"))] * 2
    function, args = d.pick(calls)
    text = ", ".join(args)
    try:
        result = eval(f"torch.{function}({text})", {"torch": torch, **d.live})
    except (RuntimeError, IndexError):
        return None
    asked = d.placements(tuple(result.shape), result.dtype, 0.3)
    if d.chance(0.3):
        axis = d.random.randrange(len(d.mesh))
        return f'with asked({{"x{axis}": "{asked.split(", ")[axis]}"}}): {d.new()} = torch.{function}({text})'
    return f'{d.new()} = call("{function}", {text}, output="{asked}")'


@of_one(has_dims)
def refuse(d: Drawing, name: str, value: torch.Tensor) -> str | None:
    """What torch refuses: shapes that do not fit, dims and indices that are not there, dtypes that are not held."""
    n, new = value.ndim, d.new()
    forms = [
        f"{new} = {name}[{value.shape[0]}]",
        f"{new} = {name}.sum({n})",
        f"{new} = {name}.view(-1, 7, 11)",
        f"{new} = {name}.transpose(0, {n})",
        f"{new} = {name} + plain((7, 13, 11), 'f64', 1)",
        f"{new} = {name} @ plain((17,), 'f64', 1)",
        f"{name}.add_(plain((2, 13, 11, 2), 'f64', 1))",
        f"{name}.copy_(plain((13, 11, 2), 'f64', 1))",
        f"{name}[{-1 - value.shape[0]}] = 1",
        f"{new} = {name}.expand(2, 13, 11)",
        f"{new} = {name}.unsqueeze({n + 2})",
        f"{new} = {name}.permute({n}, 0)",
        f"{new} = {name}.narrow(0, {value.shape[0]}, 2)",
        f"{new} = torch.cat([{name}, plain((13, 11, 2, 2), 'f64', 1)])",
        f"{new} = {name}.index_select(0, torch.tensor([{value.shape[0]}]))",
        f"{new} = {name}[:, :, :, :, 0]",
        f"{new} = {name}.unflatten(0, (7, 13))",
        f"{new} = {name}.chunk(0)",
        f"{new} = {name}.softmax({n + 1})",
    ]
    if not is_float(value):
        forms += [f"{name}.add_(0.5)", f"{name}.div_(2)", f"{new} = {name}.mean()"] * 3
    return d.pick(forms)


def without_gradients(d: Drawing) -> str | None:
    """Another line, under `no_grad`."""
    line = d.pick((write_number, write_tensor, write_item, binary, index, turn, reduce))(d)
    return line and f"with torch.no_grad(): {line}"


KINDS: dict[Callable[[Drawing], str | None], int] = {
    leaf: 3, unary: 6, number: 6, binary: 9, compare: 2, logic: 1, where: 3, cast: 1, matmul: 6, reduce: 6, along: 5,
    integers: 2, join: 2, look_up: 3, index: 9, view: 5, turn: 8, expand: 3, cut: 5, retype: 1, write_number: 7,
    write_tensor: 6, write_item: 6, write_mask: 3, write_rows: 3, hook: 4, place: 6, request: 5, refuse: 2,
    without_gradients: 5,
}  # fmt: skip


def draw_program(seed: int) -> tuple[tuple[int, ...], list[str]]:
    """A mesh and the lines of a program."""
    d = Drawing(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            d.add(leaf(d))
        steps = d.random.randrange(4, 24)
        for kind in d.random.choices(list(KINDS), list(KINDS.values()), k=steps):
            line = kind(d)
            if line is not None:
                d.add(line)
    d.lines += start_backward(d)
    d.dense.close()
    return d.mesh, d.lines


def start_backward(d: Drawing) -> list[str]:
    """Backward from the newest results, and from others."""
    tracked = [name for name, value in d.live.items() if value.requires_grad and is_float(value)]
    chosen = dict.fromkeys(tracked[-2:] + d.random.sample(tracked, min(2, len(tracked))))
    return [f"{name}.backward(like({name}, {d.seed()}), retain_graph=True)" for name in chosen]
