#!/bin/sh
# The pods' network of a node of kind, in place of kindnet, which cannot be built from Go modules.
#
# systemd keeps it running. It configures the CNI plugins for the node's pod subnet, and routes the pod subnets of other
# nodes to their addresses. It reads both from the Node objects with the kubelet's rights, so it needs no pod and no image.
set -u
credentials=/etc/kubernetes/kubelet.conf
config=/etc/cni/net.d/10-pods.conflist
fields='{.metadata.name} {.spec.podCIDR} {.status.addresses[?(@.type=="InternalIP")].address}{"\n"}'

configure() {
  [ -e "$config" ] && grep -q "\"$1\"" "$config" && return
  mkdir -p /etc/cni/net.d
  # Renamed when complete, because containerd reads every file that appears here.
  cat > "$config.new" <<END
{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "pods", "isGateway": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$1"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
END
  mv "$config.new" "$config"
}

# Addresses outside the cluster have no route back to a pod, so they see the node's address.
hide_pods() {
  pods=$(sed -n 's/^ *"\{0,1\}podSubnet"\{0,1\}: *"\{0,1\}\([0-9./]*\).*/\1/p' /kind/kubeadm.conf | head -n 1)
  rule="POSTROUTING -s $pods ! -d $pods -j MASQUERADE"
  # Without quotes: the rule is several words.
  [ -z "$pods" ] || iptables -t nat -C $rule 2>/dev/null || iptables -t nat -A $rule
}

follow() {
  kubectl --kubeconfig="$credentials" get nodes --watch -o jsonpath="$fields" | while read -r name subnet address; do
    [ -n "$address" ] || continue
    if [ "$name" = "$(hostname)" ]; then configure "$subnet"; else ip route replace "$subnet" via "$address"; fi
  done
}

while :; do
  [ -e "$credentials" ] && hide_pods && follow
  sleep 1
done
