#!/bin/sh
# reload-draft.sh PORT: has the draft that listens on PORT read its weights anew.
# All containers of the pod share one process namespace, so the process is known by its command line.
found=1
for process in /proc/[0-9]*; do
  if tr '\0' ' ' 2>/dev/null <"$process/cmdline" | grep -q -- "--listen [^ ]*:$1 "; then
    kill -HUP "${process#/proc/}" && found=0
  fi
done
exit $found
