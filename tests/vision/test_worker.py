"""VisionWorker: over real tiny ONNX models, and over a fake runner where the order of events matters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from edgerun.engine.messages import Failed, Infer, Inferred
from edgerun.errors import InvalidModelFile, ModelError, ModelLoadFailed, ProviderUnavailable
from edgerun.repository.spec import ModelSpec, PreprocessSpec, VisionSettings
from edgerun.vision.worker import VisionWorker
from tests.vision import onnx_models
from tests.vision.fakes import FakeRunner, Gate, HeldOrtRunner, Replies, hold, output, picture, rgb_picture
from tests.vision.onnx_models import RgbModel, batching, model_spec

CPU = "CPUExecutionProvider"
TINY = PreprocessSpec(width_px=8, height_px=8, crop_fraction=1.0)


@contextmanager
def working(
    spec: ModelSpec, replies: Replies, open_runner: Callable[..., Any] | None = None
) -> Iterator[VisionWorker]:
    worker = VisionWorker(spec, CPU, "chosen by the test", 1, replies, open_runner=open_runner)
    try:
        yield worker
    finally:
        worker.close()


def raw_spec(tmp_path: Path, **batch_policy: int) -> ModelSpec:
    policy = batching(**{"preferred": 1, "delay_us": 0, **batch_policy})
    (tmp_path / "m.onnx").write_bytes(b"not read by the fake")
    return model_spec(str(tmp_path / "m.onnx"), settings=VisionSettings(task="raw", dynamic_batching=policy))


# ---- answers


@pytest.mark.parametrize("batch_axis", ["n", 1, 3])
def test_each_of_many_concurrent_pictures_gets_its_own_scores(tmp_path: Path, batch_axis: int | str) -> None:
    path = RgbModel(axes=(batch_axis, 3, 8, 8)).write(tmp_path / "m.onnx")
    replies = Replies()
    cases = {i: rgb_picture(i, seed=i) for i in range(40)}
    with working(model_spec(path), replies) as worker:
        threads = [
            threading.Thread(
                target=lambda ids: [worker.submit(cases[i][0]) for i in ids], args=(range(k, 40, 8),)
            )
            for k in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for request_id, (_, expected) in cases.items():
            np.testing.assert_allclose(output(replies.get(request_id)), expected, rtol=1e-5)
        assert worker.stats().inference_count == 40


def test_batched_equals_single(tmp_path: Path) -> None:
    path = RgbModel(softmax=True).write(tmp_path / "m.onnx")
    settings = VisionSettings(preprocess=TINY, output_kind="probabilities")
    pictures = [rgb_picture(i, seed=i)[0] for i in range(12)]
    together, alone = Replies(), Replies()
    with working(model_spec(path, settings=settings), alone) as worker:
        for message in pictures:
            worker.submit(message)
            assert alone.get(message.request_id).batch_size == 1
    held = Gate()
    with working(
        model_spec(path, settings=settings), together, lambda *args: HeldOrtRunner(*args, held)
    ) as worker:
        hold(worker, held, pictures[0])
        for message in pictures[1:]:
            worker.submit(message)
        held.gate.set()
        sizes = [together.get(message.request_id).batch_size for message in pictures]
        assert sizes == [1] + [4] * 8 + [3] * 3
    for message in pictures:
        batched, single = together.get(message.request_id), alone.get(message.request_id)
        # the same sums in another order: float32 rounding
        np.testing.assert_allclose(output(batched), output(single), rtol=1e-5)


def test_float16_model_takes_float32_pictures(tmp_path: Path) -> None:
    path = RgbModel(dtype=TensorProto.FLOAT16).write(tmp_path / "m.onnx")
    replies = Replies()
    message, expected = rgb_picture(1, seed=1)
    with working(model_spec(path), replies) as worker:
        assert worker.info.input_dtype == "float16"
        worker.submit(message)
        scores = output(replies.get(1))
    assert scores.dtype == np.float16
    np.testing.assert_allclose(scores, expected, rtol=5e-3)  # float16 has 11 bits


def test_pictures_of_several_sizes_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = RgbModel(axes=("N?", 3, "hauteur", "width of image")).write(tmp_path / "m.onnx")
    replies = Replies()
    with working(model_spec(path), replies) as worker:
        for request_id, side in enumerate([4, 9, 4, 9, 1]):
            worker.submit(picture(request_id, request_id / 10, (3, side, side)))
        worker.submit(picture(5, 0.5, (4, 9, 9)))
        for request_id in range(5):
            np.testing.assert_allclose(output(replies.get(request_id)), [float(request_id)] * 3, rtol=1e-5)
        assert replies.get(5).kind == "InvalidRequest"


def test_embedding_comes_beside_the_scores(tmp_path: Path) -> None:
    path = RgbModel(embedding=True).write(tmp_path / "m.onnx")
    settings = VisionSettings(preprocess=TINY, embedding_output="means")
    replies = Replies()
    message, expected = rgb_picture(1, seed=1)
    with working(model_spec(path, settings=settings), replies) as worker:
        assert worker.info.output_names == ["y", "means"]
        worker.submit(message)
        np.testing.assert_allclose(output(replies.get(1), 0), expected, rtol=1e-5)
        np.testing.assert_allclose(output(replies.get(1), 1), expected / 10, rtol=1e-5)


def test_info_says_what_the_server_must_know(tmp_path: Path) -> None:
    path = RgbModel().write(tmp_path / "m.onnx")
    with working(model_spec(path, labels=["red", "green", "blue"]), Replies()) as worker:
        info = worker.info
        assert (info.input_name, info.input_shape, info.input_dtype) == ("x", (-1, 3, 8, 8), "float32")
        assert (info.output_names, info.num_classes) == (["y"], 3)
        assert worker.size_bytes >= Path(path).stat().st_size
        assert (worker.provider, worker.reason) == (CPU, "chosen by the test")


# ---- loading


def test_label_count_that_differs_is_refused_at_load(tmp_path: Path) -> None:
    path = onnx_models.write_wide(tmp_path / "m.onnx", 11)
    with pytest.raises(ModelLoadFailed, match="10 labels for 11 outputs"):
        VisionWorker(model_spec(path, labels=[str(i) for i in range(10)]), CPU, "", 1, Replies())
    with working(model_spec(path, labels=[str(i) for i in range(11)]), Replies()) as worker:
        assert worker.info.num_classes == 11


def test_softmax_inside_must_be_declared(tmp_path: Path) -> None:
    path = RgbModel(softmax=True).write(tmp_path / "m.onnx")
    with pytest.raises(ModelLoadFailed, match="output_kind"):
        VisionWorker(model_spec(path), CPU, "", 1, Replies())


def test_bad_file_wrong_provider_and_wrong_size_fail_in_the_constructor(tmp_path: Path) -> None:
    garbage = tmp_path / "g.onnx"
    garbage.write_bytes(b"garbage")
    path = RgbModel().write(tmp_path / "m.onnx")
    with pytest.raises(InvalidModelFile):
        VisionWorker(model_spec(str(garbage)), CPU, "", 1, Replies())
    with pytest.raises(ProviderUnavailable):
        VisionWorker(model_spec(path), "NoSuchExecutionProvider", "", 1, Replies())
    with pytest.raises(ModelLoadFailed, match="3x224x224"):
        VisionWorker(model_spec(path, settings=VisionSettings()), CPU, "", 1, Replies())


def test_model_that_fails_on_the_test_picture_is_closed_and_refused(tmp_path: Path) -> None:
    runner = FakeRunner()
    runner.outputs = ()

    def fails(batch: Any) -> list[Any]:
        raise ModelError("no kernel for this")

    runner.run = fails  # type: ignore[method-assign]
    with pytest.raises(ModelLoadFailed, match="no kernel for this"):
        VisionWorker(raw_spec(tmp_path), CPU, "", 1, Replies(), open_runner=lambda *_: runner)
    assert runner.is_closed


# ---- failures stay alone


@pytest.mark.parametrize(
    "changes", [{"shape": (3,)}, {"dtype": "complex64"}, {"data": b"1"}, {"dtype": "float64"}]
)
def test_request_that_does_not_fit_is_answered_and_the_next_one_works(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    replies, runner = Replies(), FakeRunner()
    good = picture(2, 3.0)
    fields = {"request_id": 1, "model": "tiny", "data": good.data, "shape": good.shape, "dtype": good.dtype}
    with working(raw_spec(tmp_path), replies, lambda *_: runner) as worker:
        worker.submit(Infer(**{**fields, **changes}))
        worker.submit(good)
        assert replies.get(1).kind == "InvalidRequest"
        np.testing.assert_array_equal(output(replies.get(2)), [6.0, 6.0])
        assert worker.stats().failure_count == 1


def test_bad_picture_in_a_batch_spoils_only_itself(tmp_path: Path) -> None:
    replies, runner = Replies(), FakeRunner()
    with working(raw_spec(tmp_path), replies, lambda *_: runner) as worker:
        hold(worker, runner.held, picture(0, 0.0))
        for request_id, value in [(1, 5.0), (2, 666.0), (3, 7.0)]:
            worker.submit(picture(request_id, value))
        runner.held.gate.set()
        np.testing.assert_array_equal(output(replies.get(1)), [10.0, 10.0])
        np.testing.assert_array_equal(output(replies.get(3)), [14.0, 14.0])
        assert replies.get(2).kind == "ModelError"
        assert "666" in replies.get(2).message
        assert [5.0, 666.0, 7.0] in runner.batches  # they did run together first
        stats = worker.stats()
        assert (stats.inference_count, stats.failure_count, stats.pending) == (3, 1, 0)


def test_real_runtime_failure_spoils_only_its_own_picture(tmp_path: Path) -> None:
    path = onnx_models.write_fails_on_large(tmp_path / "m.onnx")
    replies, held = Replies(), Gate()
    # The test picture of a raw model is noise of 0..1: the rows 0 and 1 exist.
    with working(
        model_spec(path, settings=VisionSettings(task="raw")),
        replies,
        lambda *args: HeldOrtRunner(*args, held),
    ) as worker:
        hold(worker, held, picture(0, 0.0, (1,)))
        for request_id, value in [(1, 0.0), (2, 9.0), (3, 1.0)]:
            worker.submit(picture(request_id, value, (1,)))
        held.gate.set()
        np.testing.assert_array_equal(output(replies.get(1)), [1.0, 2.0])
        np.testing.assert_array_equal(output(replies.get(3)), [3.0, 4.0])
        assert replies.get(2).kind == "ModelError"


def test_full_queue_answers_at_once(tmp_path: Path) -> None:
    replies, runner = Replies(), FakeRunner()
    with working(raw_spec(tmp_path, queue=2), replies, lambda *_: runner) as worker:
        hold(worker, runner.held, picture(0, 0.0))
        for request_id in (1, 2, 3):
            worker.submit(picture(request_id, 1.0))
        refused = replies.get(3)  # while the others still wait
        assert isinstance(refused, Failed)
        assert (refused.kind, refused.details["retry_after_s"]) == ("QueueFull", 1)
        assert worker.stats().pending == 3  # one runs, two wait
        runner.held.gate.set()
        assert isinstance(replies.get(1), Inferred)
        assert isinstance(replies.get(2), Inferred)


def test_undeliverable_answer_does_not_stop_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replies, runner = Replies(), FakeRunner()

    def reply(message: Any) -> None:
        if message.request_id == 1:
            raise BrokenPipeError("the channel is gone")
        replies(message)

    worker = VisionWorker(raw_spec(tmp_path), CPU, "", 1, reply, open_runner=lambda *_: runner)
    worker.submit(picture(1, 1.0))
    worker.submit(picture(2, 1.0))
    assert isinstance(replies.get(2), Inferred)
    worker.close()
    assert "could not be delivered" in caplog.text


# ---- batching, time and the end


def test_what_waits_runs_as_one_batch_in_order_on_one_thread(tmp_path: Path) -> None:
    replies, runner = Replies(), FakeRunner()
    with working(raw_spec(tmp_path), replies, lambda *_: runner) as worker:
        hold(worker, runner.held, picture(0, 0.0))
        for request_id in range(1, 11):
            worker.submit(picture(request_id, float(request_id)))
        runner.held.gate.set()
        sizes = [replies.get(request_id).batch_size for request_id in range(11)]
        assert sizes == [1] + [4] * 8 + [2] * 2
        assert runner.batches[-3:] == [[1.0, 2, 3, 4], [5.0, 6, 7, 8], [9.0, 10.0]]
        assert runner.threads - {threading.current_thread().name} == {"vision-tiny"}
        assert worker.stats().execution_count == 4


@pytest.mark.parametrize(
    ("provider", "preferred", "largest"), [(CPU, 1, 4), (CPU, 6, 6), ("CUDAExecutionProvider", 1, 8)]
)
def test_largest_batch_is_four_on_a_cpu_unless_more_is_preferred(
    tmp_path: Path, provider: str, preferred: int, largest: int
) -> None:
    replies, runner = Replies(), FakeRunner()
    spec = raw_spec(tmp_path, preferred=preferred)
    worker = VisionWorker(spec, provider, "", 1, replies, open_runner=lambda *_: runner)
    hold(worker, runner.held, picture(0, 0.0))
    for request_id in range(1, 20):
        worker.submit(picture(request_id, 1.0))
    runner.held.gate.set()
    assert max(replies.get(request_id).batch_size for request_id in range(20)) == largest
    worker.close()


def test_queue_and_inference_times_are_told_apart(tmp_path: Path) -> None:
    replies, runner = Replies(), FakeRunner()
    now = [50.0]
    worker = VisionWorker(
        raw_spec(tmp_path), CPU, "", 1, replies, open_runner=lambda *_: runner, clock=lambda: now[0]
    )
    hold(worker, runner.held, picture(0, 0.0))
    worker.submit(picture(1, 1.0))
    now[0] += 0.25
    runner.held.gate.set()
    first, second = replies.get(0), replies.get(1)
    assert (first.queue_ms, first.infer_ms) == (0.0, 250.0)
    assert (second.queue_ms, second.infer_ms) == (250.0, 0.0)
    stats = worker.stats()
    assert (stats.queue_us, stats.infer_us) == (250_000, 250_000)
    worker.close()


def test_close_lets_the_running_picture_end_and_fails_what_waits_once(tmp_path: Path) -> None:
    replies, runner = Replies(), FakeRunner()
    spec = raw_spec(tmp_path, queue=1_000_000)
    worker = VisionWorker(spec, CPU, "", 1, replies, open_runner=lambda *_: runner)
    hold(worker, runner.held, picture(0, 0.0))
    for request_id in range(1, 20):
        worker.submit(picture(request_id, 1.0))
    closing = threading.Thread(target=worker.close)
    closing.start()
    refused = 20
    worker.submit(picture(refused, 1.0))
    while refused not in replies.all_now():  # taken: close() had not begun yet
        refused += 1
        worker.submit(picture(refused, 1.0))
    runner.held.gate.set()
    closing.join(timeout=30)
    answers = replies.all_now()
    assert sorted(answers) == list(range(refused + 1))
    assert isinstance(answers[0], Inferred)
    assert {answers[i].kind for i in range(1, refused + 1)} == {"EngineLost"}  # type: ignore[attr-defined]
    assert runner.is_closed


def test_a_replaced_model_runs_what_waits_before_it_goes(tmp_path: Path) -> None:
    replies, runner = Replies(), FakeRunner()
    spec = raw_spec(tmp_path, queue=1_000_000)
    worker = VisionWorker(spec, CPU, "", 1, replies, open_runner=lambda *_: runner)
    hold(worker, runner.held, picture(0, 0.0))
    for request_id in range(1, 20):
        worker.submit(picture(request_id, 1.0))
    closing = threading.Thread(target=lambda: worker.close(runs_waiting=True))
    closing.start()
    runner.held.gate.set()
    closing.join(timeout=30)
    answers = replies.all_now()
    assert sorted(answers) == list(range(20))
    assert all(isinstance(answer, Inferred) for answer in answers.values())
    assert runner.is_closed


def test_close_again_and_submit_after_it_are_safe(tmp_path: Path) -> None:
    replies, runner = Replies(), FakeRunner()
    worker = VisionWorker(raw_spec(tmp_path), CPU, "", 1, replies, open_runner=lambda *_: runner)
    worker.close()
    worker.close()
    worker.submit(picture(1, 1.0))
    assert replies.get(1).kind == "EngineLost"
    assert "tiny" in replies.get(1).message
    assert worker.stats().pending == 0


def test_closing_under_load_answers_every_request_once(tmp_path: Path) -> None:
    path = RgbModel().write(tmp_path / "m.onnx")
    replies = Replies()
    worker = VisionWorker(model_spec(path), CPU, "", 1, replies)
    messages = [rgb_picture(i, seed=i)[0] for i in range(200)]
    threads = [
        threading.Thread(target=lambda part: [worker.submit(m) for m in part], args=(messages[k::4],))
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    replies.get(0)
    worker.close()
    for thread in threads:
        thread.join()
    assert sorted(replies.all_now()) == list(range(200))
