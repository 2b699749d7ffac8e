"""Optimizers against Keras's own, under XLA, through a checkpoint, and used wrongly."""

import numpy as np
import pytest
import tensorflow as tf

from crankshaft.engine import optimizers
from crankshaft.engine.step.context import StepContext
from crankshaft.parts.parameter_servers.pulled import OnServers, PulledValues, read_progress
from tests.arrays import assert_same

keras = tf.keras.optimizers
SHAPES = {"kernel": (7, 5), "bias": (5,), "filters": (3, 3, 2, 4), "gain": ()}


def make_variables(shapes=SHAPES):
    rng = np.random.default_rng(1)
    values = {name: rng.normal(0.0, 0.1, shape) for name, shape in shapes.items()}
    if "gain" in values:
        values["gain"] += 1.0  # a lone number that passes near zero has no relative error
    return [tf.keras.Variable(value.astype("float32"), name=n) for n, value in values.items()]


def gradients_of_step(step, shapes=SHAPES):
    rng = np.random.default_rng(1000 + step)
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes.values()]


def train(optimizer, variables, steps, first=0, jit=False):
    apply = tf.function(lambda *gradients: optimizer.apply(gradients, variables), jit_compile=jit)
    for step in range(first, first + steps):
        apply(*gradients_of_step(step))
    return [variable.numpy() for variable in variables]


def train_keras(optimizer, variables, steps):
    for step in range(steps):
        optimizer.apply(gradients_of_step(step), variables)
    return [variable.numpy() for variable in variables]


def assert_equal_within(tolerance, ours, theirs):
    """By each variable's norm: a weight that passes near zero has no relative error of its own."""
    for our, their in zip(ours, theirs, strict=True):
        assert np.linalg.norm(our - their) <= tolerance * np.linalg.norm(their)


def built(optimizer, variables):
    optimizer.build(variables)
    return optimizer


AS_KERAS = {
    "sgd": ("sgd", keras.SGD, {}),
    "sgd with decay": ("sgd", keras.SGD, {"weight_decay": 0.01}),
    "momentum": ("momentum", keras.SGD, {"momentum": 0.9}),
    "momentum nesterov": ("momentum", keras.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": ("adam", keras.Adam, {}),
    "adam betas": ("adam", keras.Adam, {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-3}),
    "adamw": ("adamw", keras.AdamW, {}),
    "adamw with decay": ("adamw", keras.AdamW, {"weight_decay": 0.1}),
    "adagrad": ("adagrad", keras.Adagrad, {}),
    "adagrad from zero": ("adagrad", keras.Adagrad, {"initial_accumulator_value": 0.0}),
    "rmsprop": ("rmsprop", keras.RMSprop, {}),
    "rmsprop momentum": ("rmsprop", keras.RMSprop, {"momentum": 0.5, "rho": 0.99}),
    "rmsprop long memory": ("rmsprop", keras.RMSprop, {"rho": 0.999}),
    "rmsprop centered": (
        "rmsprop",
        keras.RMSprop,
        {"centered": True, "momentum": 0.5, "epsilon": 1e-3},
    ),
    "ftrl": ("ftrl", keras.Ftrl, {}),
    "ftrl regularized": (
        "ftrl",
        keras.Ftrl,
        {
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.03,
            "beta": 0.1,
            "weight_decay": 0.01,
        },
    ),
}


@pytest.mark.parametrize(
    "scheduled", [pytest.param(False, marks=pytest.mark.slow), True], ids=["constant", "scheduled"]
)
@pytest.mark.parametrize("case", AS_KERAS)
def test_fifty_dense_updates_equal_those_of_keras(case, scheduled):
    name, keras_class, arguments = AS_KERAS[case]
    rate = keras.schedules.CosineDecay(0.02, 40, alpha=0.1) if scheduled else 0.01
    ours, theirs = make_variables(), make_variables()
    optimizer = built(optimizers.build(name, rate, **arguments), ours)
    if name == "momentum":
        arguments = {"nesterov": False, **arguments}
    result = train(optimizer, ours, 50)
    expected = train_keras(keras_class(rate, **arguments), theirs, 50)
    # The same float32 arithmetic in another order: a few roundings of 6e-8 over fifty updates. Keras corrects Adam's
    # rate by powers in float32, which makes steps up to 3e-5 too long; what ours are is tested below.
    assert_equal_within(1e-5 if name.startswith("adam") else 1e-6, result, expected)
    assert optimizer.iterations.numpy() == 50


def adamw_in_float64(gradients, rate, decay, beta_1, beta_2, epsilon=1e-7):
    """The weights after each step from 0 (Kingma & Ba 2015, algorithm 1, epsilon as at the end of section 2)."""
    w = m = v = np.zeros(gradients.shape[1:])
    for t, gradient in enumerate(gradients.astype(np.float64), start=1):
        m = beta_1 * m + (1 - beta_1) * gradient
        v = beta_2 * v + (1 - beta_2) * gradient**2
        w = w - rate * decay * w - rate * np.sqrt(1 - beta_2**t) / (1 - beta_1**t) * m / (np.sqrt(v) + epsilon)
        yield w


@pytest.mark.parametrize("kind", ["dense", "dense under XLA", "sparse"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.9999)])
def test_adams_steps_are_those_of_float64(betas, kind):
    """With its corrections from float32 powers all of them were 7e-6 too long, or 8e-5 by the second betas."""
    gradients = np.random.default_rng(1).normal(size=(1000, 50, 4)).astype(np.float32)
    rate = float(np.float32(0.01))
    variable = tf.Variable(tf.zeros([50, 4]))
    optimizer = built(optimizers.build("adamw", rate, weight_decay=0.1, beta_1=betas[0], beta_2=betas[1]), [variable])

    @tf.function(jit_compile=kind == "dense under XLA")
    def apply(gradient):
        slices = tf.IndexedSlices(gradient, tf.range(50), tf.constant([50, 4]))
        optimizer.apply([slices if kind == "sparse" else gradient], [variable])

    for step, expected in enumerate(adamw_in_float64(gradients, rate, 0.1, *betas), start=1):
        apply(tf.constant(gradients[step - 1]))
        # A step's own roundings are of 1e-7; those of weights, which grow, add up.
        error = np.linalg.norm(variable.numpy() - expected) / np.linalg.norm(expected)
        assert error < (3e-7 if step <= 40 else 1e-6), step


@pytest.mark.parametrize("name", ["lion", "nadam", "adamax", "Adadelta", "Lamb"])
def test_a_keras_optimizer_through_the_adapter_equals_its_own_apply(name):
    ours, theirs = make_variables(), make_variables()
    optimizer = built(optimizers.build(name, 0.01), ours)
    keras_class = {c.lower(): getattr(keras, c) for c in dir(keras)}[name.lower()]
    result = train(optimizer, ours, 20)
    assert_equal_within(1e-6, result, train_keras(keras_class(0.01), theirs, 20))
    assert int(optimizer.keras_optimizer.iterations) == 20


def test_a_keras_object_keeps_its_own_schedule_and_decay():
    def make():
        rate = keras.schedules.ExponentialDecay(0.05, 5, 0.5)
        return keras.Lion(rate, weight_decay=0.1)

    ours, theirs = make_variables(), make_variables()
    optimizer = built(optimizers.KerasOptimizer(make()), ours)
    assert_equal_within(1e-6, train(optimizer, ours, 20), train_keras(make(), theirs, 20))


@pytest.mark.parametrize("make", [lambda: optimizers.build("sgd", 0.1), lambda: optimizers.KerasOptimizer(keras.SGD())])
def test_servers_can_have_any_built_optimizer_lock_and_send_16_bits(make):
    optimizer = built(make(), make_variables())
    optimizer.move_to(OnServers(tf.bfloat16))
    with pytest.raises(AttributeError, match="has no setting locking"):
        optimizer.locking = True


def test_servers_refuse_a_rule_whose_workers_would_lose_each_other_s_factors():
    with pytest.raises(ValueError, match="optimizer Nadam has a value of its own"):
        built(optimizers.build("nadam", 0.1), make_variables()).move_to(OnServers())


@pytest.mark.parametrize("option", [{"clipnorm": 1.0}, {"use_ema": True}, {"gradient_accumulation_steps": 2}])
def test_a_keras_object_that_does_the_engines_work_is_refused(option):
    optimizer = optimizers.KerasOptimizer(keras.Adam(**option))
    with pytest.raises(ValueError, match=next(iter(option))):
        optimizer.build(make_variables())


def test_the_float16_of_a_keras_object_is_the_engines():
    scaled = optimizers.KerasOptimizer(lambda: keras.LossScaleOptimizer(keras.SGD(0.1)))
    with pytest.raises(ValueError, match="does with precision=float16; set that, and give the inner optimizer alone"):
        scaled.build(make_variables())


def test_a_keras_object_made_outside_the_scope_is_refused():
    optimizer = optimizers.KerasOptimizer(keras.Lion())
    with (
        tf.distribute.OneDeviceStrategy("CPU:0").scope(),
        pytest.raises(ValueError, match="outside the strategy's scope"),
    ):
        optimizer.build(make_variables())


def test_weight_decay_leaves_out_what_the_expression_finds():
    variables = make_variables()
    arguments = {"weight_decay": 0.1, "weight_decay_exclude": "bias|gain"}
    optimizer = built(optimizers.build("sgd", 0.5, **arguments), variables)
    before = [variable.numpy() for variable in variables]
    optimizer.apply([tf.zeros(shape) for shape in SHAPES.values()], variables)
    for variable, old in zip(variables, before, strict=True):
        factor = 1.0 if variable.name in ("bias", "gain") else 0.95
        np.testing.assert_allclose(variable.numpy(), factor * old, rtol=1e-6)


def test_a_variable_without_gradient_is_left_alone_and_the_step_counts():
    variables = make_variables()
    optimizer = built(optimizers.build("adamw", 0.5), variables)
    before = variables[1].numpy()
    gradients = gradients_of_step(0)
    gradients[1] = None
    optimizer.apply(gradients, variables)
    np.testing.assert_array_equal(variables[1].numpy(), before)
    assert optimizer.iterations.numpy() == 1


def test_a_keras_constraint_holds_after_the_update():
    variable = tf.keras.Variable(np.ones(3, "float32"))
    variable.constraint = tf.keras.constraints.NonNeg()
    optimizer = built(optimizers.build("sgd", 1.0), [variable])
    optimizer.apply([tf.constant([0.5, 2.0, -1.0])], [variable])
    np.testing.assert_array_equal(variable.numpy(), [0.5, 0.0, 2.0])


def test_the_scale_lowers_the_rate_of_every_update():
    variables = make_variables({"w": (2,)})
    optimizer = built(optimizers.build("sgd", keras.schedules.CosineDecay(1.0, 10)), variables)
    optimizer.learning_rate_scale.assign(0.25)
    before = variables[0].numpy()
    optimizer.apply([tf.ones(2)], variables)
    np.testing.assert_allclose(variables[0].numpy(), before - 0.25, rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", ["engine", "keras"])
def test_a_learning_rate_that_was_read_stays_that_of_its_moment(kind, jit):
    variables, schedule = make_variables(), keras.schedules.CosineDecay(1.0, 10)
    given = optimizers.build("sgd", schedule) if kind == "engine" else optimizers.KerasOptimizer(keras.SGD(schedule))
    optimizer = built(given, variables)
    train(optimizer, variables, 4, jit=jit)
    optimizer.learning_rate_scale.assign(0.5)
    then = optimizer.learning_rate
    train(optimizer, variables, 3, first=4, jit=jit)
    optimizer.learning_rate_scale.assign(0.25)
    # Cosine decay, Loshchilov and Hutter 2017: half of 1 + cos(pi t / T).
    assert float(then) == pytest.approx(0.5 * (1 + np.cos(np.pi * 0.4)) / 2, rel=1e-6)
    assert float(optimizer.learning_rate) == pytest.approx(0.25 * (1 + np.cos(np.pi * 0.7)) / 2, rel=1e-6)


@pytest.mark.parametrize("kind", ["engine", "keras"])
def test_the_rate_of_the_last_update_is_the_one_that_it_took(kind):
    """Also where it was lowered since, as on a plateau, or twice."""
    variables, schedule = make_variables({"w": (2,)}), keras.schedules.PolynomialDecay(1.0, 7)
    given = optimizers.build("sgd", schedule) if kind == "engine" else optimizers.KerasOptimizer(keras.SGD(schedule))
    optimizer = built(given, variables)
    assert float(optimizer.last_learning_rate()) == 1.0
    for scale in (None, 0.5, 0.5, 0.25, None, None):
        before = variables[0].numpy()
        optimizer.apply([tf.ones(2)], variables)
        taken = float((before - variables[0].numpy())[0])
        if scale:
            optimizer.scale_learning_rate(0.7)
            optimizer.scale_learning_rate(scale)
        assert float(optimizer.last_learning_rate()) == pytest.approx(taken, rel=1e-3)  # a difference of float32
    assert taken == pytest.approx(0.25 * (1 - 5 / 7), rel=1e-3)


def test_pulled_progress_serves_one_update_and_others_read_their_own():
    variables = make_variables({"w": (2,)})
    optimizer = built(optimizers.build("sgd", keras.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])), variables)
    optimizer.move_to(OnServers())
    optimizer.learning_rate_scale.assign(8.0)
    before = variables[0].numpy()

    @tf.function
    def step(progress):
        with StepContext(start_values=PulledValues(progress={id(optimizer): progress})):
            tf.cond(progress[0] > 0, lambda: optimizer.apply([tf.ones(2)], variables), lambda: None)
        with StepContext(start_values=PulledValues(progress={id(optimizer): progress})):
            optimizer.apply([tf.ones(2)], variables)
            optimizer.apply([tf.ones(2)], variables)
        return read_progress(optimizer)

    # Pulled: after 0 updates, a scale of 0.25. As the variables have it: after 1, of 8.
    progress = step(tf.constant([0.0, 0.25, 0.0], tf.float64))
    np.testing.assert_allclose(variables[0].numpy(), before - 1.0 * 0.25 - 0.5 * 8.0, rtol=1e-6)
    np.testing.assert_array_equal(progress.numpy(), [2.0, 8.0, 2.0])
    # Within a condition nothing that was pulled is gone by: after 2 updates, of 8; then after 7, of 0.25.
    before = variables[0].numpy()
    step(tf.constant([7.0, 0.25, 7.0], tf.float64))
    np.testing.assert_allclose(variables[0].numpy(), before - 0.5 * (8.0 + 0.25 + 8.0), rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "adagrad", "rmsprop", "ftrl", "lion"])
def test_dense_updates_compile_under_xla(name):
    plain, compiled = make_variables(), make_variables()
    arguments = {"weight_decay": 0.01, "learning_rate": 0.01}
    expected = train(built(optimizers.build(name, **arguments), plain), plain, 10)
    optimizer = built(optimizers.build(name, **arguments), compiled)
    # XLA has its own pow and sqrt, and contracts a * b + c.
    assert_equal_within(1e-5, train(optimizer, compiled, 10, jit=True), expected)


@pytest.mark.parametrize("name", ["momentum", "adam", "rmsprop", "ftrl", "nadam"])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(name, tmp_path):
    def start():
        variables = make_variables()
        optimizer = built(optimizers.build(name, 0.01), variables)
        held = {f"variable{i}": variable.value for i, variable in enumerate(variables)}
        return variables, optimizer, tf.train.Checkpoint(optimizer=optimizer, **held)

    variables, optimizer, checkpoint = start()
    train(optimizer, variables, 5)
    optimizer.learning_rate_scale.assign(0.5)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    straight = train(optimizer, variables, 5, first=5)

    variables, optimizer, checkpoint = start()
    checkpoint.read(path).assert_consumed()
    resumed = train(optimizer, variables, 5, first=5)
    assert_same(straight, resumed)
    assert optimizer.learning_rate_scale.numpy() == 0.5


def test_slots_have_readable_names_that_do_not_depend_on_earlier_models(tmp_path):
    def keys():
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
        optimizer = built(optimizers.build("adam", 0.1), model.trainable_variables)
        path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "checkpoint"))
        return sorted(name.split("/.ATTRIBUTES")[0] for name, _ in tf.train.list_variables(path))

    assert keys() == keys()
    assert keys()[1:] == [
        "optimizer/iterations",
        "optimizer/learning_rate_scale",
        "optimizer/slots/0000_kernel/m",
        "optimizer/slots/0000_kernel/v",
        "optimizer/slots/0001_bias/m",
        "optimizer/slots/0001_bias/v",
        "optimizer/update_counts",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adm", {}, "unknown optimizer 'adm'; did you mean adam"),
        ("adam", {"beta1": 0.9}, "argument of optimizer adam 'beta1'; did you mean beta_1"),
        ("lion", {"beta1": 0.9}, "argument of optimizer lion 'beta1'; did you mean beta_1"),
        ("sgd", {"weight_decay": -1.0}, "weight_decay=-1.0 is negative"),
    ],
)
def test_a_mistake_is_answered_with_the_cure(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        optimizers.build(name, 0.1, **arguments)


def test_misuse_says_what_to_do():
    known, stranger = make_variables({"known": (2,), "stranger": (2,)})
    optimizer = optimizers.build("sgd", 0.1)
    with pytest.raises(RuntimeError, match="call build"):
        optimizer.apply([tf.ones(2)], [known])
    optimizer.build([known])
    with pytest.raises(RuntimeError, match="already built"):
        optimizer.build([known])
    with pytest.raises(ValueError, match="without variable stranger"):
        optimizer.apply([tf.ones(2)], [stranger])
    of_keras = built(optimizers.KerasOptimizer(keras.SGD(keras.schedules.PolynomialDecay(1.0, 7))), [known])
    with pytest.raises(ValueError, match=r"is a schedule, or 0, so it can't be set to 0\.1"):
        of_keras.learning_rate = 0.1
    half = tf.Variable(tf.ones(2, tf.bfloat16), name="half")
    with pytest.raises(ValueError, match="half is bfloat16"):
        optimizers.build("adam", 0.1).build([half])
