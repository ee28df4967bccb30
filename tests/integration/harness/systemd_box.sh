#!/usr/bin/env bash
# First process of a systemd box: makes the file system private where systemd and the tests write, then becomes systemd.
# Started by systemd_box.py in new namespaces, never by hand: without a mount namespace of its own it would hide this machine's folders.
set -euo pipefail

[ $$ = 1 ] || { echo "systemd_box.sh must be process 1 of its own namespace" >&2; exit 2; }
mount --make-rprivate /
needed=() hidden=()
eval "needed=($BOX_NEEDED) hidden=($BOX_HIDDEN)"  # quoted by systemd_box.py

# Keep a way to what is about to be hidden.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/exchange /run/needed /run/systemd/system /run/lock /run/etc
mount --bind "$BOX_EXCHANGE" /run/exchange
for i in "${!needed[@]}"; do
  mkdir "/run/needed/$i"
  mount --bind "${needed[i]}" "/run/needed/$i"
done

# /etc: a private copy without what the machine's own systemd would start.
cp -a /etc/. /run/etc/
rm -rf /run/etc/systemd/system
mkdir -p /run/etc/systemd/system

# The first thing that a booting systemd may do is to empty /tmp.
mount -o remount,bind,ro /
for folder in /tmp /var/tmp; do mount -t tmpfs -o mode=1777 tmpfs "$folder"; done
for folder in /var/lib /var/log "${hidden[@]}"; do
  [ ! -d "$folder" ] || mount -t tmpfs -o mode=755 tmpfs "$folder" # it may be gone with a folder above it
done
mount --bind /run/etc /etc
for i in "${!needed[@]}"; do
  [ -e "${needed[i]}" ] && continue
  mkdir -p "${needed[i]}"
  mount --bind "/run/needed/$i" "${needed[i]}"
done

# systemd wants a cgroup tree of its own; under a cgroup namespace this one begins at the box.
while mountpoint -q /sys/fs/cgroup; do umount -R /sys/fs/cgroup; done
mount -t cgroup2 none /sys/fs/cgroup

# Of the boot only the journal: udev, tmpfiles, sysctl and the like belong to the machine.
for unit in /lib/systemd/system/{sysinit,local-fs,basic,sockets,timers,paths,multi-user}.target.wants/*; do
  name=${unit##*/}
  case $name in
    systemd-journald.service | systemd-journald.socket | systemd-journald-dev-log.socket | '*') ;;
    *) ln -sf /dev/null "/run/systemd/system/$name" ;;
  esac
done
printf '[Journal]\nStorage=volatile\nReadKMsg=no\nAudit=\n' > /etc/systemd/journald.conf  # not the kernel's log, nor its audit

cat > /run/systemd/system/box.service << UNIT
[Unit]
DefaultDependencies=no
After=systemd-journald.socket
Wants=systemd-journald.socket
[Service]
Type=oneshot
TimeoutStartSec=infinity
Environment="PATH=$PATH"
ExecStart=/bin/bash -c 'timeout -k 5 $BOX_SECONDS bash /run/exchange/script > /run/exchange/output 2>&1; echo \$\$? > /run/exchange/status'
ExecStopPost=/bin/systemctl --no-block exit
UNIT
printf '[Unit]\nDefaultDependencies=no\nWants=box.service\n' > /run/systemd/system/box.target

# `container` tells systemd to leave the kernel's settings and the host name alone, and to end instead of powering off.
exec env -i container=forebay-box PATH="$PATH" "$BOX_SYSTEMD" --system --unit=box.target --log-target=journal --show-status=0
