{{- define "kvroute.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvroute.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvroute.labels" -}}
{{ include "kvroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvroute.account" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "kvroute.name" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "kvroute.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /* HTTP, and the event ports of every data-parallel rank, by name: some network plug-ins ignore endPort. */ -}}
{{- define "kvroute.enginePorts" -}}
{{- $ports := list (.Values.engines.port | int) }}
{{- range $base := .Values.engines.eventPorts }}
{{- range $rank := until ($.Values.engines.dataParallelSize | int) }}{{ $ports = append $ports (add $base $rank | int) }}{{ end }}
{{- end }}
{{- range $ports | uniq }}
- {protocol: TCP, port: {{ . }}}
{{- end }}
{{- end }}

{{- /* Where engines connect to, one port for each data-parallel rank. */ -}}
{{- define "kvroute.listenPorts" -}}
{{- range $rank := until (.Values.engines.dataParallelSize | int) }}
- {name: events-{{ $rank }}, protocol: TCP, port: {{ add $.Values.listen.port $rank }}}
{{- end }}
{{- end }}

{{- define "kvroute.keys" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" (include "kvroute.name" .)) }}
{{- end }}

{{- /* Whether routers tell each other anything, for which they need one secret. */ -}}
{{- define "kvroute.shares" -}}
{{- if or .Values.board.url .Values.state.peers }}true{{ end }}
{{- end }}

{{- define "kvroute.boardSecret" -}}
{{ .Values.board.existingSecret | default (printf "%s-board" (include "kvroute.name" .)) }}
{{- end }}

{{- /* What the chart knows, and over it what the user says. */ -}}
{{- define "kvroute.config" -}}
{{- $pairs := list }}
{{- range $name, $value := .Values.engines.labels }}{{ $pairs = append $pairs (printf "%s=%s" $name $value) }}{{ end }}
{{- $found := dict "selector" (join "," $pairs) "port" .Values.engines.port }}
{{- $server := dict "host" "0.0.0.0" "port" 8000 "client_api_key" "${CLIENT_KEY}" "operator_api_key" "${OPERATOR_KEY}" }}
{{- $_ := set $server "timeouts" (dict "shutdown_grace_s" (.Values.shutdownGraceSeconds | int)) }}
{{- if .Values.tls.secret }}
{{- $tls := dict "certificate" "/etc/kvroute-tls/tls.crt" "key" "/etc/kvroute-tls/tls.key" }}
{{- if .Values.tls.clientCA }}{{ $_ := set $tls "client_ca" "/etc/kvroute-client-ca/ca.crt" }}{{ end }}
{{- $_ := set $server "tls" $tls }}
{{- end }}
{{- $listening := dict }}
{{- if .Values.listen.enabled }}
{{- if or .Values.autoscaling.enabled (gt (.Values.replicas | int) 1) }}
{{- fail "listen.enabled: an engine connects to one router: replicas must be 1, without autoscaling" }}
{{- end }}
{{- $ranks := .Values.engines.dataParallelSize | int }}
{{- $listening = dict "listen" (printf "tcp://*:%v" .Values.listen.port) "listen_ranks" $ranks }}
{{- $sources := list }}
{{- range $rank := until $ranks }}
{{- $source := dict "endpoint" "listen" "dp_rank" $rank }}
{{- if $.Values.listen.replayPort }}
{{- $_ := set $source "replay_endpoint" (printf "tcp://*:%d" (add $.Values.listen.replayPort $rank)) }}
{{- end }}
{{- $sources = append $sources $source }}
{{- end }}
{{- $_ := set $found "replica" (dict "kv_events" $sources) }}
{{- end }}
{{- $known := dict "server" $server "discovery" (dict "kubernetes" (list $found)) }}
{{- if $listening }}{{ $_ := set $known "events" $listening }}{{ end }}
{{- if .Values.picker.enabled }}
{{- $_ := set $known "doors" (dict "ext_proc" (dict "listen" (printf "0.0.0.0:%v" .Values.picker.port))) }}
{{- end }}
{{- if include "kvroute.shares" . }}
{{- $board := dict "secret" "${BOARD_SECRET}" }}
{{- with .Values.board }}
{{- if .url }}{{ $_ := set $board "url" .url }}{{ end }}
{{- if .username }}{{ $_ := set $board "username" .username }}{{ end }}
{{- if and .url .passwordKey }}{{ $_ := set $board "password" "${BOARD_PASSWORD}" }}{{ end }}
{{- if .caConfigMap }}{{ $_ := set $board "ca" "/etc/kvroute-board-ca/ca.crt" }}{{ end }}
{{- end }}
{{- $_ := set $known "board" $board }}
{{- end }}
{{- $state := dict }}
{{- if .Values.state.peers }}
{{- $scheme := ternary "https" "http" (not (empty .Values.tls.secret)) }}
{{- $_ := set $state "peers" (list (printf "%s://%s-peers.%s.svc:8000" $scheme (include "kvroute.name" .) .Release.Namespace)) }}
{{- $tls := dict }}
{{- if .Values.state.peerCAConfigMap }}{{ $_ := set $tls "ca" "/etc/kvroute-peer-ca/ca.crt" }}{{ end }}
{{- if .Values.tls.clientCA }}
{{- $_ := set $tls "certificate" "/etc/kvroute-tls/tls.crt" }}
{{- $_ := set $tls "key" "/etc/kvroute-tls/tls.key" }}
{{- end }}
{{- if $tls }}{{ $_ := set $state "peer_tls" $tls }}{{ end }}
{{- end }}
{{- if .Values.state.snapshots.enabled }}{{ $_ := set $state "directory" "/var/lib/kvroute" }}{{ end }}
{{- if $state }}{{ $_ := set $known "state" $state }}{{ end }}
{{- $made := mergeOverwrite $known (deepCopy .Values.config) }}
{{- if ne (toString $made.server.port) "8000" }}
{{- fail "config.server.port: must be 8000, where probes, services and policies find the router; service.port is for clients" }}
{{- end }}
{{- toYaml $made }}
{{- end }}
