"""POST /v1/images/classify: bytes to labels. Decoding and preprocessing run in the picture threads."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from edgerun.engine.messages import Inferred, OutputTensor
from edgerun.errors import EdgerunError, InvalidImage, InvalidRequest, ModelError
from edgerun.pixels.image import decode_image
from edgerun.pixels.postprocess import Prediction, scores, top_k
from edgerun.pixels.preprocess import preprocess
from edgerun.server.errors import json_response
from edgerun.server.models import ReadyVision
from edgerun.server.pictures import read_pictures
from edgerun.server.sse import run_unless_gone
from edgerun.server.state import AppState, State

router = APIRouter()
CLASSIFY_PATH = "/v1/images/classify"


class Timing(msgspec.Struct, frozen=True):
    """Milliseconds of one picture: in the picture threads, waiting for a batch, in the batch, all in all."""

    preprocess: float
    queue: float
    infer: float
    total: float


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One picture's answer: predictions, or the error that this picture alone has."""

    index: int
    predictions: list[Prediction] | None = None
    timing_ms: Timing | None = None
    error: str | None = None


class Classified(msgspec.Struct, frozen=True):
    model: str
    version: int
    provider: str
    data: list[Row]


@dataclass(frozen=True, slots=True)
class _Pixels:
    array: NDArray[np.generic]  # one input, without the batch axis
    preprocess_ms: float


@router.post(CLASSIFY_PATH, response_model=None)
async def classify(request: Request, state: State) -> Response:
    """Label pictures: a form (`file` repeatable, `model`, `top_k`), a raw picture, or JSON with data URIs."""
    asked = await read_pictures(request)
    name = await state.models.default_name("vision") if asked.model is None else asked.model
    model = await run_unless_gone(request, state.models.vision(name))
    if model.spec.vision.task != "classify":
        raise InvalidRequest(f"{name} does not classify: its task is {model.spec.vision.task}", param="model")
    num_best = asked.top_k or model.spec.vision.top_k
    rows = await run_unless_gone(request, _rows(state, model, asked.pictures, num_best))
    answer = Classified(model.spec.name, model.loaded.version, model.loaded.provider, rows)
    return json_response(msgspec.json.encode(answer))


async def _rows(
    state: AppState, model: ReadyVision, pictures: tuple[bytes | InvalidImage, ...], num_best: int
) -> list[Row]:
    """One row a picture, in their order. Raises the first error when no picture came through."""
    results = await asyncio.gather(
        *(_one(state, model, picture, num_best, index) for index, picture in enumerate(pictures)),
        return_exceptions=True,
    )
    rows: list[Row] = []
    first_error: EdgerunError | None = None
    for index, result in enumerate(results):
        if isinstance(result, Row):
            rows.append(result)
        elif isinstance(result, EdgerunError):
            first_error = first_error or result
            rows.append(Row(index, error=result.message))
        else:
            raise result  # a bug, or cancelled: not this picture's fault
    if first_error is not None and all(row.error is not None for row in rows):
        raise first_error
    return rows


async def _one(
    state: AppState, model: ReadyVision, picture: bytes | InvalidImage, num_best: int, index: int
) -> Row:
    labels = (model.spec.name, str(model.loaded.version))
    started_s = time.monotonic()
    try:
        if isinstance(picture, InvalidImage):
            raise picture
        loop = asyncio.get_running_loop()
        pixels = await loop.run_in_executor(state.image_pool, _prepare, picture, model)
        array = pixels.array
        inferred = await state.engine.infer(model.spec.name, array.tobytes(), array.shape, array.dtype.name)
        predictions = _predictions(inferred, model, num_best)
    except EdgerunError as error:
        reason = "REJECTED" if isinstance(error, InvalidImage) else "BACKEND"
        state.metrics.pictures_failed.labels(*labels, reason).inc()
        raise
    state.metrics.pictures_ok.labels(*labels).inc()
    timing = Timing(
        preprocess=round(pixels.preprocess_ms, 3),
        queue=round(inferred.queue_ms, 3),
        infer=round(inferred.infer_ms, 3),
        total=round((time.monotonic() - started_s) * 1e3, 3),
    )
    return Row(index, predictions, timing)


def _prepare(picture: bytes, model: ReadyVision) -> _Pixels:
    """Runs in a picture thread."""
    started_s = time.monotonic()
    image = decode_image(picture)
    array = preprocess(image, model.spec.vision.preprocess, model.info.input_dtype)
    return _Pixels(array, (time.monotonic() - started_s) * 1e3)


def _predictions(inferred: Inferred, model: ReadyVision, num_best: int) -> list[Prediction]:
    output = _output(inferred, model.spec.vision.output)
    raw = np.frombuffer(output.data, dtype=output.dtype).reshape(output.shape)
    return top_k(scores(raw, model.spec.vision.output_kind), model.spec.labels, num_best)


def _output(inferred: Inferred, wanted: str) -> OutputTensor:
    """The output that the config names, else the first that the file declares."""
    for output in inferred.outputs:
        if output.name == wanted or not wanted:
            return output
    names = ", ".join(output.name for output in inferred.outputs)
    raise ModelError(f"the model has no output {wanted}; it has {names}")
