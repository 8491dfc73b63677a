{{/* Of 25 characters at most, as a pool's name and Kubernetes' own follow, and the whole is a worker's id of up to 64. */}}
{{- define "epdflow.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 25 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 25 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 25 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "epdflow.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "epdflow.labels" -}}
{{ include "epdflow.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Given: image (of values), root. */}}
{{- define "epdflow.image" -}}
image: {{ printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) | quote }}
imagePullPolicy: {{ .image.pullPolicy }}
{{- end -}}

{{- define "epdflow.pod" -}}
serviceAccountName: {{ include "epdflow.fullname" . }}
automountServiceAccountToken: false
# A Service called `epd` would set EPD_PORT, one called `vllm` VLLM_PORT.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "epdflow.hardened" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Variables of one process. Given: root, role, env (a map: what is later in it, or in the user's, comes first), and podIp
     where they name the pod's address. */}}
{{- define "epdflow.env" -}}
{{- $brokers := .root.Values.brokers -}}
{{- $role := .role -}}
{{- $nats := list -}}
{{- range $brokers.nats.servers -}}
{{- $nats = append $nats (printf "%s://%s:$(NATS_PASSWORD)@%s" $brokers.nats.scheme $role .) -}}
{{- end -}}
{{- $env := dict
  "EPD_NATS_URL" (join "," $nats)
  "EPD_NATS_REPLICAS" (toString (int $brokers.nats.replicas))
  "EPD_REDIS_URL" (printf "%s://%s:$(REDIS_PASSWORD)@%s/0" $brokers.valkey.scheme $role $brokers.valkey.server)
  "EPD_DRAIN_S" (toString (int .root.Values.drainS)) -}}
{{- if $brokers.nats.caSecret }}{{ $_ := set $env "EPD_NATS_CA" "/etc/epdflow/nats-ca/ca.crt" }}{{ end -}}
{{- if $brokers.valkey.caSecret }}{{ $_ := set $env "EPD_REDIS_CA" "/etc/epdflow/valkey-ca/ca.crt" }}{{ end -}}
{{- if .root.Values.traces.endpoint -}}
{{- $_ := set $env "EPD_OTLP_ENDPOINT" .root.Values.traces.endpoint -}}
{{- $_ := set $env "EPD_TRACE_SAMPLE" (toString .root.Values.traces.sample) -}}
{{- end -}}
{{- $env = mergeOverwrite $env .env .root.Values.env .own -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- if .podIp }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
- name: NATS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $brokers.nats.passwordsSecret }}, key: {{ printf "EPD_NATS_%s_PASSWORD" (upper $role) }}}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $brokers.valkey.passwordsSecret }}, key: {{ printf "EPD_REDIS_%s_PASSWORD" (upper $role) }}}}
{{- range $name, $value := $env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "epdflow.brokerMounts" -}}
{{- with .Values.brokers.nats.caSecret }}
- {name: nats-ca, mountPath: /etc/epdflow/nats-ca, readOnly: true}
{{- end }}
{{- with .Values.brokers.valkey.caSecret }}
- {name: valkey-ca, mountPath: /etc/epdflow/valkey-ca, readOnly: true}
{{- end }}
{{- end -}}

{{- define "epdflow.brokerVolumes" -}}
{{- with .Values.brokers.nats.caSecret }}
- {name: nats-ca, secret: {secretName: {{ . }}}}
{{- end }}
{{- with .Values.brokers.valkey.caSecret }}
- {name: valkey-ca, secret: {secretName: {{ . }}}}
{{- end }}
{{- end -}}

{{/* Spread over nodes and zones, as far as there are some. Given: the labels to count. */}}
{{- define "epdflow.spread" -}}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $.selector | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
  {{- end }}
{{- end -}}

{{/* A model's name as in subjects and consumers (protocol/subjects.py): other bytes than letters, digits, _ and - as =XX. */}}
{{- define "epdflow.modelToken" -}}
{{- range regexFindAll "." . -1 -}}
{{- if regexMatch "^[A-Za-z0-9_-]$" . -}}{{ . }}{{- else -}}{{ regexReplaceAll "(..)" (printf "%X" .) "=${1}" }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* All pools with their defaults and what follows from their names, as JSON. */}}
{{- define "epdflow.pools" -}}
{{- $given := .Values.pools -}}
{{- if not $given -}}
{{- $given = dict "encoder" (dict "containers" (dict "encoder" dict)) "pd" (dict "containers" (dict "pd" dict)) -}}
{{- end -}}
{{- $pools := dict -}}
{{- range $name, $own := $given -}}
{{- if $own -}}
{{- $pool := dict "name" $name "model" "default" "replicas" 1 "shmSize" "1Gi" "tmpSize" "4Gi" "startupS" 1800 "maxSurge" 1
  "scaling" (dict "enabled" false "min" 1 "max" 4
    "jobsPerWorker" (dict "encoder" 16 "pd" 24) "queueAgeS" (dict "encoder" 2 "pd" 0)) -}}
{{- $pool = mergeOverwrite $pool $own -}}
{{- if and $pool.scaling.enabled (gt (int $pool.scaling.min) (int $pool.scaling.max)) -}}
{{- fail (printf "the pool %q has a scaling.min of %d, which is above its scaling.max of %d" $name (int $pool.scaling.min) (int $pool.scaling.max)) -}}
{{- end -}}
{{- $_ := set $pool "pdRole" "" -}}
{{- if hasKey $pool.containers "pd" -}}
{{- $_ := set $pool "pdRole" (default "pd" (default dict $pool.containers.pd).role) -}}
{{- end -}}
{{- if not (hasKey $.Values.models $pool.model) -}}
{{- fail (printf "the pool %q has the model %q, which is not in models" $name $pool.model) -}}
{{- end -}}
{{- $model := get $.Values.models $pool.model -}}
{{- $_ := set $pool "clientName" (default $model.source $model.servedName) -}}
{{- $_ := set $pool "fullname" (printf "%s-%s" (include "epdflow.fullname" $) $name) -}}
{{- $_ := set $pool "selector" (printf "%s\napp.kubernetes.io/component: worker\nepd-pool: %s" (include "epdflow.selector" $) $name) -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.arena.kind "pod") (eq .Values.arena.stores "arena") -}}
{{- $pods := dict -}}
{{- range $pool := $pools -}}
{{- $most := ternary (int $pool.scaling.max) (int $pool.replicas) $pool.scaling.enabled -}}
{{- $_ := set $pods $pool.model (add (default 0 (get $pods $pool.model)) $most) -}}
{{- if gt (int (get $pods $pool.model)) 1 -}}
{{- fail (printf "arena.stores is arena, which the pods of the model %q do not share (arena.kind is pod): it must have redis" $pool.model) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $prefills := dict -}}
{{- range $pool := $pools }}{{ if eq $pool.pdRole "prefill" }}{{ $_ := set $prefills $pool.model true }}{{ end }}{{ end -}}
{{- range $pool := $pools -}}
{{- if and (eq $pool.pdRole "decode") (not (hasKey $prefills $pool.model)) -}}
{{- fail (printf "the pool %q has the role decode, and no pool of the model %q has the role prefill, from which its jobs would come" $pool.name $pool.model) -}}
{{- end -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* Egress rules to name servers, brokers and the trace collector. Given: policy, traces, and of each broker a peer and its ports. */}}
{{- define "epdflow.toShared" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
  to:
    {{- toYaml .policy.dnsTo | nindent 4 }}
- ports: {{ toJson .natsPorts }}
  {{- if .policy.brokers }}
  to:
    - {{- toYaml .nats | nindent 6 }}
  {{- end }}
- ports: {{ toJson .valkeyPorts }}
  {{- if .policy.brokers }}
  to:
    - {{- toYaml .valkey | nindent 6 }}
  {{- end }}
{{- if .traces.endpoint }}
- ports: [{port: {{ default (ternary "443" "80" (hasPrefix "https" .traces.endpoint)) (trimPrefix ":" (regexFind ":[0-9]+" .traces.endpoint)) }}}]
  to:
    {{- toYaml .policy.tracesTo | nindent 4 }}
{{- end }}
{{- end -}}
