//! Arrays of the kernel side, mapped into this process: thousands of entries are looked through
//! without a system call.

use std::{io, marker::PhantomData, mem::size_of, os::fd::AsFd as _, ptr};

use aya::maps::{Map, MapData};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// An array map with the flag `BPF_F_MMAPABLE` (5.5) and values of type `T`.
///
/// The kernel side writes at the same time, so nothing here gives a reference to a value: fields are
/// copied one by one.
#[derive(Debug)]
pub struct Shared<T> {
    base: ptr::NonNull<u8>,
    entries: u32,
    bytes: usize,
    kind: PhantomData<T>,
}

// SAFETY: the memory belongs to the map, not to a thread, and is accessed by volatile copies only.
unsafe impl<T> Send for Shared<T> {}

impl<T: Copy> Shared<T> {
    /// Distance of two values (`round_up(value_size, 8)` in `array_map_alloc`).
    const STRIDE: usize = size_of::<T>().next_multiple_of(8);

    /// Maps an array. `T` must be the type of its values, of integers only.
    ///
    /// # Errors
    /// The map is no such array, or the kernel refuses.
    pub fn open(map: &Map) -> io::Result<Self> {
        let Map::Array(data) = map else {
            return Err(io::Error::other("not an array map"));
        };
        Self::map(data)
    }

    fn map(data: &MapData) -> io::Result<Self> {
        let info = data.info().map_err(io::Error::other)?;
        if info.value_size() as usize != size_of::<T>() {
            return Err(io::Error::other(format!(
                "values of {} bytes instead of {}",
                info.value_size(),
                size_of::<T>()
            )));
        }
        let entries = info.max_entries();
        let bytes = entries as usize * Self::STRIDE;
        // SAFETY: a new mapping, of the whole map, at an address that the kernel chooses.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                data.fd().as_fd(),
                0,
            )
        }?;
        let base = ptr::NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self {
            base,
            entries,
            bytes,
            kind: PhantomData,
        })
    }

    /// Number of values.
    pub const fn len(&self) -> u32 {
        self.entries
    }

    /// Where a value is.
    ///
    /// # Panics
    /// Beyond the end.
    pub fn at(&self, index: u32) -> *mut T {
        assert!(index < self.entries, "{index} of {}", self.entries);
        // SAFETY: within the mapping; values are aligned to 8 bytes.
        unsafe { self.base.as_ptr().add(index as usize * Self::STRIDE).cast() }
    }

    /// A copy of a value, which may be half old and half new.
    pub fn get(&self, index: u32) -> T {
        // SAFETY: the pointer is valid and aligned; any bytes are a value.
        unsafe { self.at(index).read_volatile() }
    }

    /// Overwrites a value.
    pub fn set(&self, index: u32, value: T) {
        // SAFETY: as above; the mapping is writable.
        unsafe { self.at(index).write_volatile(value) }
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, which nobody refers to any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
