"""Models of keras_hub are trained on strings: a classifier, and a language model with LoRA.

`bridge.fit` takes a task of keras_hub with the strings that the task's own `fit` takes. The script
first trains a small BERT to tell from which of four tragedies a speech is. Then it trains a small
GPT-2 on three of the tragedies, and fine-tunes it to the fourth with low-rank adapters (LoRA). The
weights of the base are frozen, in float32, int8 or int4. After every epoch the model writes a few
words, and at the end another process, with keras_hub but without functrain, loads the adapters and
predicts the same.

All weights are random at the start, so that nothing is downloaded. With pretrained weights only the
lines change that make the model: `keras_hub.models.GPT2CausalLM.from_preset("gpt2_base_en")`.

    python examples/finetune.py            # some minutes on two CPU cores
    python examples/finetune.py --quick    # about two minutes, most of it compilation
"""

# %% Options. The script needs keras_hub: `pip install keras-hub`
from _example import arguments

args = arguments(
    __doc__,
    quick="a few steps of each training",
    packages={"keras_hub": "pip install keras-hub"},
    epochs=(6, "epochs of each training"),
    rank=(4, "rank of the adapters"),
)

import gzip
import os
import re
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keras_hub imports TensorFlow

import bridge  # before keras: it chooses the backend
import keras
import keras_hub
import matplotlib.figure
import numpy as np
import tokenizers

epochs = 2 if args.quick else args.epochs
keras.utils.set_random_seed(args.seed)

# %% Data. Speeches are separated by empty lines, and begin with the name of the speaker. A fifth of
# them is held out. The data are strings, which `bridge.fit` takes in their order: they are shuffled
# here
with gzip.open(args.data / "tragedies.txt.gz", "rt", encoding="ascii") as file:
    whole_text = file.read()
PLAYS = ["Hamlet", "King Lear", "Macbeth", "Othello"]
plays = re.split(r"HAMLET, PRINCE|THE TRAGEDY OF|\nMACBETH\n|\nOTHELLO, THE MOOR", whole_text)[1:]
speeches = [
    (speech.partition("\n")[2], label)
    for label, play in enumerate(plays)
    for speech in play.split("\n\n")
    if len(speech.split()) > 8
]
order = np.random.default_rng(args.seed).permutation(len(speeches))
order = order[: 200 if args.quick else len(order)]
texts = np.array([speeches[i][0] for i in order])
labels = np.array([speeches[i][1] for i in order], np.int32)
held_out = len(texts) // 5
print(f"{len(texts):,} speeches; of Othello {np.mean(labels == 3):.0%}")

# %% A classifier. The tokenizer knows the words of the training texts that occur twice or more
words, counts = np.unique(
    re.findall(r"[a-z]+", " ".join(texts[held_out:]).lower()), return_counts=True
)
vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words[counts > 1].tolist()]
classifier = keras_hub.models.BertTextClassifier(
    keras_hub.models.BertBackbone(
        vocabulary_size=len(vocabulary),
        num_layers=1,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        max_sequence_length=64,
        dropout=0.3,
    ),
    num_classes=4,
    preprocessor=keras_hub.models.BertTextClassifierPreprocessor(
        keras_hub.tokenizers.BertTokenizer(vocabulary, lowercase=True), sequence_length=64
    ),
)
classifier.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
bridge.fit(
    classifier,
    texts[held_out:],
    labels[held_out:],
    batch_size=32,
    epochs=epochs,
    validation_data=(texts[:held_out], labels[:held_out]),
    shuffle=False,
    verbose=2,
)
majority = np.bincount(labels[:held_out]).max() / held_out
logs = bridge.evaluate(classifier, texts[:held_out], labels[:held_out], verbose=0, return_dict=True)
print(f"classifier: accuracy {logs['accuracy']:.3f}, of the most frequent play {majority:.3f}")
speech = "Out, damned spot! out, I say! Hell is murky! Who would have thought the old man"
logits = bridge.predict(classifier, np.array([speech]), verbose=0)
print(f"{speech[:30]!r} is from {PLAYS[int(logits.argmax())]}")

# %% A language model. Its tokenizer has pieces of words, found by byte-pair encoding. The end of a
# text has the last number, because `generate` would take 0, which fills up texts, for an end. The
# base is trained on the three other plays
bpe = tokenizers.ByteLevelBPETokenizer()
bpe.train_from_iterator(texts, vocab_size=511, show_progress=False)
bpe.save_model(str(args.output))
pieces = {**bpe.get_vocab(), "<|endoftext|>": 511}


def language_model():
    merges = str(args.output / "merges.txt")
    tokenizer = keras_hub.tokenizers.GPT2Tokenizer(pieces, merges)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        num_layers=2,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=256,
        max_sequence_length=64,
    )
    return keras_hub.models.GPT2CausalLM(
        backbone, keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=64)
    )


def compiled(task, rate):
    sampler = keras_hub.samplers.TopKSampler(k=10, temperature=0.8, seed=args.seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.compile(keras.optimizers.Adam(rate), loss, sampler=sampler)
    return task


is_othello = labels == 3
others, othello = texts[~is_othello], texts[is_othello]
othello, held_out_othello = othello[len(othello) // 5 :], othello[: len(othello) // 5]
options = {"batch_size": 32, "epochs": epochs, "shuffle": False, "verbose": 2}
base = compiled(language_model(), 3e-3)
bridge.fit(base, others, **options)
base.save(args.output / "base.keras")
base_loss = bridge.evaluate(base, held_out_othello, verbose=0, return_dict=True)["loss"]
print(f"base: {base.count_params():,} weights; loss on Othello {base_loss:.3f}")


# %% LoRA on a float32, int8 and int4 base. `enable_lora` freezes the backbone, and adds matrices of
# low rank to the projections of queries and values. The embeddings stay in float32: in Keras 3.15.1
# the gradient through an int8 embedding that also computes the logits is wrong. A callback writes a
# text after every epoch: `self.model` has the weights of that epoch
QUANTIZED = "^(?!.*embedding)"  # the names of layers without this word


class Sample(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(repr(self.model.generate("My lord", max_length=40)))


def adapted(dtype):
    """Returns the base in a dtype, with adapters."""
    task = keras.saving.load_model(args.output / "base.keras", compile=False)
    if dtype != "float32":
        task.backbone.quantize(dtype, filters=QUANTIZED)
    task.backbone.enable_lora(args.rank)
    # The biases of these layers are trainable as well, and the file of the adapters lacks them.
    for variable in task.trainable_variables:
        variable.trainable = "lora" in variable.path
    return compiled(task, 3e-3)


histories, tasks = {}, {}
for dtype in ("float32", "int8", "int4"):
    print(f"\nLoRA on a base of {dtype}")
    task = tasks[dtype] = adapted(dtype)
    history = bridge.fit(
        task, othello, validation_data=(held_out_othello,), callbacks=[Sample()], **options
    )
    histories[dtype] = history.history["val_loss"]
    trained = sum(v.value.size for v in task.trainable_variables)
    size = sum(np.asarray(v.value).nbytes for v in task.variables)
    print(
        f"{dtype}: loss on Othello {histories[dtype][-1]:.3f}, with {trained:,} trained weights "
        f"and {size / 1e6:.2f} MB in all"
    )

# %% Saving. The adapters are a file of their own, which keras_hub writes and reads. Another process
# loads the base, quantizes it and adds them
tasks["int8"].backbone.save_lora_weights(args.output / "othello.lora.h5")
ELSEWHERE = """
import sys, keras, keras_hub, numpy as np
base, adapters, texts, predictions, quantized = sys.argv[1:]
task = keras.saving.load_model(base, compile=False)
task.backbone.quantize("int8", filters=quantized)
task.backbone.load_lora_weights(adapters)
np.save(predictions, task.predict(np.load(texts), verbose=0))
assert "functrain" not in sys.modules
"""
names = ("base.keras", "othello.lora.h5", "texts.npy", "predictions.npy")
files = [str(args.output / name) for name in names]
np.save(files[2], held_out_othello[:8])
subprocess.run([sys.executable, "-c", ELSEWHERE, *files, QUANTIZED], check=True)
elsewhere = np.load(files[3])
here = tasks["int8"].predict(held_out_othello[:8], verbose=0)
difference = float(np.max(np.abs(here - elsewhere)))
print(f"\nlogits here and in another process differ by at most {difference:g}")

# %% Plot. The loss on speeches of Othello that were held out, by the dtype of the base
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
for (dtype, losses), marker in zip(histories.items(), "os^", strict=True):
    panel.plot(range(1, epochs + 1), losses, f"{marker}-", label=f"LoRA on {dtype}")
panel.axhline(base_loss, color="black", ls="--", label="base")
panel.set(xlabel="epoch", ylabel="loss on held-out speeches, per token")
panel.legend()
figure.savefig(args.output / "finetune.png", dpi=120)
print(f"wrote {args.output / 'finetune.png'}")
