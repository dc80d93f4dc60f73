"""Hub and trackers are muted and listed; a Trainer's run leaves its output folder and all others as they were."""

import os
from pathlib import Path

import pytest

import thinning
import walled
from dryfit.settings.choices import Wall

pytestmark = pytest.mark.heavy

ONLINE = """
def online(*args, mode=None, **kwargs):
    assert mode in ("disabled", "debug"), mode
    return "run"
init = init_run = online
def login(*args, **kwargs): raise AssertionError("the network was asked")
sweep = log = login
class Experiment:
    def __init__(self, *args, **kwargs): login()
    @classmethod
    def init(cls, *args, **kwargs): login()
class Task(Experiment): pass
class Live(Experiment): pass
class Run(Experiment): pass
class EmissionsTracker(Experiment): pass
"""
"""A tracker that must not be used as it is."""

CASES = {
    "repositories": """
import huggingface_hub
from huggingface_hub import HfApi, CommitOperationAdd, create_repo, upload_file, upload_folder
assert str(create_repo('x')) == 'https://huggingface.co/user/x' and create_repo('me/x').repo_id == 'me/x'
assert create_repo('me/d', repo_type='dataset').repo_type == 'dataset'
Path('card').write_bytes(b'12345'); Path('more').mkdir()
Path('more/a').write_bytes(b'1'); Path('more/b.tmp').write_bytes(b'12')
api = HfApi()
done = api.upload_file(path_or_fileobj='card', path_in_repo='card', repo_id='me/x')
assert done.oid and done.repo_url.repo_id == 'me/x', done
upload_file(path_or_fileobj=io.BytesIO(b'123'), path_in_repo='y', repo_id='me/x')
future = api.upload_folder(folder_path='more', repo_id='me/x', ignore_patterns='*.tmp', run_as_future=True)
assert future.done() and future.result().commit_message
api.create_commit('me/x', [CommitOperationAdd('z', b'1234567890')], commit_message='m')
api.delete_repo('me/gone'); api.create_tag('me/x', tag='v'); api.create_branch('me/x', branch='b')
huggingface_hub.login(token='hf_x')
assert os.environ['HF_TOKEN'] == 'hf_x'
said = {(muted.what, muted.where): muted.bytes for muted in muting.muted}
assert said['hub repository', 'me/x'] == 5 + 3 + 1 + 10, said
assert ('hub repository', 'me/gone') in said and ('hub: login', '') in said""",
    "datasets": """
import datasets
rows = datasets.Dataset.from_dict({'a': [1, 2, 3]})
rows.push_to_hub('me/rows')
datasets.DatasetDict({'train': rows, 'test': rows}).push_to_hub('me/both')
said = {muted.where: muted.bytes for muted in muting.muted}
assert said['me/rows'] == 24 and said['me/both'] == 48, said
rows.save_to_disk('rows')
assert datasets.load_from_disk('rows')['a'][:] == [1, 2, 3]
rows.to_parquet('rows.parquet'); rows.to_json('rows.json'); rows.to_csv('rows.csv')
assert datasets.load_dataset('parquet', data_files='rows.parquet', split='train')['a'][:] == [1, 2, 3]
assert datasets.load_dataset('json', data_files='rows.json', split='train')['a'][:] == [1, 2, 3]""",
    "tokenizers": """
import tokenizers, transformers
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0, '[UNK]': 1}, unk_token='[UNK]'))
words.save('words.json')
assert tokenizers.Tokenizer.from_file('words.json').get_vocab_size() == 2
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
fast.save_pretrained('out/tokenizer')
assert transformers.AutoTokenizer.from_pretrained('out/tokenizer').vocab_size == 2
fast.push_to_hub('me/words')
assert 'me/words' in [muted.where for muted in muting.muted]""",
    "trackers": """
import wandb, swanlab, neptune, comet_ml, clearml, aim, dvclive, trackio
from codecarbon import EmissionsTracker
wandb.init(project='p', name='n', mode='online'); wandb.login(); swanlab.init(project='q'); neptune.init_run()
experiment = comet_ml.Experiment(project_name='c')
experiment.log_metric('a', 1); experiment.set_name('x')
task = clearml.Task.init(project_name='t')
task.get_logger().report_scalar('a', 'b', 1, 2)
run = aim.Run(); run['hparams'] = {}; run.track(1, name='loss')
with dvclive.Live() as live: live.log_metric('a', 1)
tracker = EmissionsTracker(); tracker.start(); assert float(tracker.stop()) == 0
trackio.init(project='k'); trackio.log({'a': 1})
said = [(muted.what, muted.where) for muted in muting.muted]
assert said[:2] == [('wandb run', 'p/n'), ('wandb run', '')] and ('comet_ml run', 'c') in said, said
assert {what.split()[0] for what, _ in said} == {'wandb', 'swanlab', 'neptune', 'comet_ml', 'clearml', 'aim', 'dvclive',
                                                 'codecarbon', 'trackio'}, said""",
    "mlflow": """
import mlflow
mlflow.set_tracking_uri('http://server:5000')
assert mlflow.start_run().startswith('file:'), mlflow.start_run()
assert [(muted.what, muted.where) for muted in muting.muted][0] == ('mlflow run', 'http://server:5000')""",
    "trainer": """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
model = BertForSequenceClassification(BertConfig(**sizes))
rows = [{'input_ids': torch.arange(8), 'labels': torch.tensor(i % 2)} for i in range(8)]
args = TrainingArguments(
    'out', per_device_train_batch_size=4, max_steps=3, save_steps=1, eval_steps=1, eval_strategy='steps', use_cpu=True,
    save_strategy='steps', save_total_limit=2, load_best_model_at_end=True, push_to_hub=True, hub_model_id='me/trained',
    report_to=[])
trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows)
trainer.train()
found = sorted(os.listdir('out'))
assert 'checkpoint-3' in found and len([name for name in found if 'checkpoint' in name]) <= 2, found
trainer.save_model('final')
trainer.train(resume_from_checkpoint=True)
trainer.push_to_hub()
model.push_to_hub('me/other')
again = BertForSequenceClassification.from_pretrained('final')
said = {(muted.what, muted.where): muted.bytes for muted in muting.muted}
assert said['hub repository', 'me/trained'] > 10_000 and said['hub repository', 'me/other'] > 10_000, said
""",
}

PROGRAMS = {
    "programs": """
import subprocess
subprocess.run(['git', '--version'], capture_output=True); os.system('true'); os.system('nvidia-smi > /dev/null 2>&1')
said = [muted.where for muted in muting.muted if 'program' in muted.what]
assert 'git' in said and 'nvidia-smi' not in said, said""",
}
"""Only where no wall holds them."""

MLFLOW = """
import os
assert os.environ.get('MLFLOW_DISABLE_TELEMETRY') == 'true', 'it would ask its maker for settings'
uri = 'http://default:5000'

class MlflowClient:
    def __init__(self, tracking_uri=None, registry_uri=None):
        self.uri = tracking_uri or uri
        if self.uri.startswith('file:') and not os.environ.get('MLFLOW_ALLOW_FILE_STORE'):
            raise RuntimeError('folders are in maintenance mode')

def set_tracking_uri(server):
    global uri
    uri = server

def set_registry_uri(server):
    pass

def start_run(run_name=None):
    return MlflowClient().uri
"""
"""MLflow as far as it is changed; its newer versions refuse folders unless a variable allows them."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with an output folder of an earlier run."""
    old = tmp_path / "project" / "out" / "checkpoint-1"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_bytes(b"weights")
    (old / "trainer_state.json").write_text("{}")
    return tmp_path / "project"


def test_services_are_muted_and_nothing_real_is_changed(project: Path, tmp_path: Path) -> None:
    stubs = tmp_path / "stubs"
    for name in ("wandb", "swanlab", "neptune", "comet_ml", "clearml", "aim", "dvclive", "codecarbon", "trackio"):
        (stubs / name).mkdir(parents=True)
        (stubs / name / "__init__.py").write_text(ONLINE)
    (stubs / "mlflow.py").write_text(MLFLOW)
    before = walled.tree(project)
    head = f"import io, sys\nsys.path.append({str(stubs)!r})\n"
    caches = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_TOKEN": ""}
    told = walled.run_each(head, CASES, tmp_path / "scratch", project, walls=[Wall.NAMESPACES], **caches)
    if thinning.FULL_VARIABLE in os.environ:
        datasets = {"datasets": CASES["datasets"]}
        walled.run_each(head, datasets, tmp_path / "scratch", project, walls=[Wall.LANDLOCK], **caches)
    walled.run_each(head, PROGRAMS, tmp_path / "scratch", project, walls=[Wall.REDIRECT], **caches)
    saved = {muted.where for (_, name), of_case in told.items() if name == "trainer" for muted in of_case}
    assert not told or str(project / "final") in saved
    assert not told or any(
        where.startswith(str(project / "out" / "checkpoint-")) for where in saved
    )  # which, is up to the losses
    assert walled.tree(project) == before
