"""What the launch files may say, strictly: of each API the fields that we use, and some
that one may come to want beside them."""

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {'type': 'string', 'minLength': 1}
TEXTS: Schema = {'type': 'object', 'additionalProperties': TEXT}
NAME: Schema = {'type': 'string', 'pattern': '^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$'}
BOOLEAN: Schema = {'type': 'boolean'}
COUNT: Schema = {'type': 'integer', 'minimum': 0}
CODE: Schema = {'type': 'integer', 'minimum': 1, 'maximum': 255}  # 0 is no failure


def one(*values: str) -> Schema:
  return {'enum': list(values)}


def many(items: Schema) -> Schema:
  return {'type': 'array', 'minItems': 1, 'uniqueItems': True, 'items': items}


def fields(*required: str, **properties: Schema) -> Schema:
  """An object with these fields and no others."""
  return {
    'type': 'object',
    'additionalProperties': False,
    'required': list(required),
    'properties': properties,
  }


# Kubernetes core/v1 and batch/v1.
_METADATA = fields('name', name=NAME, namespace=NAME, labels=TEXTS, annotations=TEXTS)
_VARIABLE = fields(
  'name',
  name={'type': 'string', 'pattern': '^[A-Za-z_][A-Za-z0-9_]*$'},
  value={'type': 'string'},
  valueFrom=fields('fieldRef', fieldRef=fields('fieldPath', fieldPath=TEXT)),
)
_QUANTITIES: Schema = {
  'type': 'object',
  'additionalProperties': {'type': ['integer', 'string']},
}
_CONTAINER = fields(
  'name',
  'image',
  'command',
  name=NAME,
  image=TEXT,
  command=many(TEXT),
  args=many(TEXT),
  workingDir=TEXT,
  env=many(_VARIABLE),
  resources=fields(limits=_QUANTITIES, requests=_QUANTITIES),
)
_POD = fields(
  'containers',
  'restartPolicy',
  containers=many(_CONTAINER),
  restartPolicy=one('Never'),  # podFailurePolicy allows no other
  terminationGracePeriodSeconds=COUNT,
  nodeSelector=TEXTS,
  serviceAccountName=NAME,
  hostNetwork=BOOLEAN,
  dnsPolicy=one('ClusterFirst', 'ClusterFirstWithHostNet', 'Default', 'None'),
)
_EXIT_CODES = fields(
  'operator',
  'values',
  containerName=NAME,
  operator=one('In', 'NotIn'),
  values=many(CODE),
)
_JOB = fields(
  'template',
  'completionMode',
  'parallelism',
  'completions',
  activeDeadlineSeconds=COUNT,
  backoffLimit=COUNT,
  completionMode=one('Indexed', 'NonIndexed'),
  parallelism=COUNT,
  completions=COUNT,
  podFailurePolicy=fields(
    'rules',
    rules=many(
      fields(
        'action',
        action=one('FailJob', 'FailIndex', 'Ignore', 'Count'),
        onExitCodes=_EXIT_CODES,
        onPodConditions=many(
          fields('type', type=TEXT, status=one('True', 'False', 'Unknown'))
        ),
      )
    ),
  ),
  template=fields('spec', metadata=fields(labels=TEXTS, annotations=TEXTS), spec=_POD),
)

# jobset.x-k8s.io/v1alpha2.
_TARGETS = many(NAME)
_ACTIONS = one(
  'FailJobSet',
  'RestartJobSet',
  'RestartJobSetAndIgnoreMaxRestarts',
  'RestartJob',
  'RestartJobAndIgnoreMaxRestarts',
)
_REASONS = one(
  'BackoffLimitExceeded',
  'DeadlineExceeded',
  'FailedIndexes',
  'MaxFailedIndexesExceeded',
  'PodFailurePolicy',
)
JOBSET = fields(
  'apiVersion',
  'kind',
  'metadata',
  'spec',
  apiVersion=one('jobset.x-k8s.io/v1alpha2'),
  kind=one('JobSet'),
  metadata=_METADATA,
  spec=fields(
    'replicatedJobs',
    coordinator=fields(
      'replicatedJob', replicatedJob=NAME, jobIndex=COUNT, podIndex=COUNT
    ),
    failurePolicy=fields(
      maxRestarts=COUNT,
      restartStrategy=one('Recreate', 'BlockingRecreate', 'InPlaceRestart'),
      rules=many(
        fields(
          'name',
          'action',
          name={
            'type': 'string',
            'pattern': '^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$',
          },
          action=_ACTIONS,
          onJobFailureReasons=many(_REASONS),
          onJobFailureMessagePatterns=many(TEXT),
          targetReplicatedJobs=_TARGETS,
        )
      ),
    ),
    network=fields(
      enableDNSHostnames=BOOLEAN, subdomain=NAME, publishNotReadyAddresses=BOOLEAN
    ),
    replicatedJobs=many(
      fields(
        'name',
        'template',
        name=NAME,
        groupName=NAME,
        replicas=COUNT,
        template=fields('spec', metadata=fields(labels=TEXTS), spec=_JOB),
      )
    ),
    successPolicy=fields(
      'operator', operator=one('All', 'Any'), targetReplicatedJobs=_TARGETS
    ),
    suspend=BOOLEAN,
    ttlSecondsAfterFinished=COUNT,
  ),
)

# SkyPilot's task file, of a managed job.
_NULLABLE: Schema = {'type': ['string', 'number', 'null']}
SKY = fields(
  'name',
  'resources',
  'run',
  name=NAME,
  workdir=TEXT,
  num_nodes={'type': 'integer', 'minimum': 1},
  resources=fields(
    infra=TEXT,
    accelerators={'type': 'string', 'pattern': '^[A-Za-z0-9-]+(:[0-9]+)?$'},
    accelerator_args=fields(
      runtime_version=TEXT, tpu_vm=BOOLEAN, gcp_queued_resource=BOOLEAN
    ),
    cpus=_NULLABLE,
    memory=_NULLABLE,
    disk_size=COUNT,
    image_id=TEXT,
    use_spot=BOOLEAN,
    job_recovery=fields(
      strategy=TEXT,
      max_restarts_on_errors=COUNT,
      recover_on_exit_codes=many(CODE),
    ),
  ),
  envs={'type': 'object', 'additionalProperties': _NULLABLE},
  secrets={'type': 'object', 'additionalProperties': _NULLABLE},
  file_mounts={'type': 'object'},
  setup=TEXT,
  run=TEXT,
)
