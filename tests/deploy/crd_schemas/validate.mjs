// Validates custom resources against the schemas of their CRDs: a JSON array of manifests on stdin, a JSON array of
// messages on stdout, null for a valid one. The models check types, enums, patterns and required fields; unknown
// fields pass.
import * as gateway from '@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1';
import * as keda from '@kubernetes-models/keda/keda.sh/v1alpha1';
import * as prometheus from '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1';
import { text } from 'node:stream/consumers';

const groups = {
  'gateway.networking.k8s.io/v1': gateway,
  'keda.sh/v1alpha1': keda,
  'monitoring.coreos.com/v1': prometheus,
};

function problem(manifest) {
  const Model = groups[manifest.apiVersion]?.[manifest.kind];
  if (!Model) return `no model of ${manifest.apiVersion} ${manifest.kind}`;
  try {
    new Model(manifest).validate();
    return null;
  } catch (error) {
    return String(error.message);
  }
}

console.log(JSON.stringify(JSON.parse(await text(process.stdin)).map(problem)));
