//! Reads whole hash maps with BPF_MAP_LOOKUP_BATCH (5.6), one system call for thousands of entries.
//!
//! aya 0.14 has no batch operations; entry by entry a map of 10,000 port spaces costs 20,000 calls for
//! every look.

use std::{
    io,
    mem::size_of,
    os::fd::{AsFd as _, AsRawFd as _, RawFd},
};

use aya::{Pod, maps::MapData};

const BPF_MAP_LOOKUP_BATCH: libc::c_long = 24;

/// The member `batch` of `union bpf_attr`.
#[repr(C)]
#[derive(Default)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// Memory for the entries asked for at once.
const CHUNK_BYTES: usize = 512 << 10;

/// All entries of a hash map.
///
/// # Errors
/// The error of the system call.
pub fn read<K: Pod, V: Pod>(map: &MapData) -> io::Result<Vec<(K, V)>> {
    let mut all = Vec::new();
    run(map, |key, value| all.push((key, value)))?;
    Ok(all)
}

fn run<K: Pod, V: Pod>(map: &MapData, mut look: impl FnMut(K, V)) -> io::Result<()> {
    let fd = map.fd().as_fd().as_raw_fd();
    let mut room = (CHUNK_BYTES / (size_of::<K>() + size_of::<V>())).clamp(64, 4096);
    let mut cursor = None;
    loop {
        let (entries, next) = match chunk::<K, V>(fd, cursor, room) {
            // One bucket holds more than there was room for: nothing was read.
            Err(e) if e.raw_os_error() == Some(libc::ENOSPC) && room < 1 << 20 => {
                room *= 4;
                continue;
            }
            other => other?,
        };
        for (key, value) in entries {
            look(key, value);
        }
        match next {
            Some(next) => cursor = Some(next),
            None => return Ok(()),
        }
    }
}

type Chunk<K, V> = (Vec<(K, V)>, Option<u32>);

fn chunk<K: Pod, V: Pod>(fd: RawFd, cursor: Option<u32>, room: usize) -> io::Result<Chunk<K, V>> {
    let mut keys = Vec::<K>::with_capacity(room);
    let mut values = Vec::<V>::with_capacity(room);
    let (first, mut next) = (cursor.unwrap_or(0), 0u32);
    let mut attr = BatchAttr {
        in_batch: if cursor.is_some() {
            (&raw const first) as u64
        } else {
            0
        },
        out_batch: (&raw mut next) as u64,
        keys: keys.as_mut_ptr() as u64,
        values: values.as_mut_ptr() as u64,
        count: u32::try_from(room).unwrap_or(u32::MAX),
        map_fd: fd.cast_unsigned(),
        ..BatchAttr::default()
    };
    // SAFETY: the attribute points to room for `count` keys and values, and to cursors of four bytes,
    // which is what hash maps use.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_MAP_LOOKUP_BATCH,
            &raw mut attr,
            size_of::<BatchAttr>(),
        )
    };
    let ended = if result < 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ENOENT) {
            return Err(error);
        }
        true
    } else {
        false
    };
    let n = attr.count as usize;
    // SAFETY: the kernel has written `count` keys and values, which are plain data.
    unsafe {
        keys.set_len(n);
        values.set_len(n);
    }
    Ok((
        keys.into_iter().zip(values).collect(),
        (!ended).then_some(next),
    ))
}
