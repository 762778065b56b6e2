//! Large tables of small values, which are looked into at random.

use std::{
    alloc::{Layout, handle_alloc_error},
    marker::PhantomData,
    ops::{Deref, DerefMut},
    ptr::{self, NonNull},
    slice,
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A value that may be all zeros.
///
/// # Safety
/// Bytes that are all zero must be a valid value.
pub(super) unsafe trait Zeroed: Copy {}

// SAFETY: it is 0.
unsafe impl Zeroed for u64 {}

/// Values that are all zero at first; memory is taken where they are used, in huge pages if the kernel
/// gives them.
///
/// A table of 32 MiB has 8192 small pages, which no processor's TLB holds: each look would walk the
/// page tables first. In huge pages it has 16.
pub(super) struct Table<T> {
    /// What was mapped.
    map: NonNull<u8>,
    mapped: usize,
    /// The first value, on the boundary of a huge page.
    first: NonNull<T>,
    length: usize,
    owned: PhantomData<T>,
}

/// A table of plain words.
pub(super) type Words = Table<u64>;

/// A huge page on x86-64, and on `AArch64` with small pages of 4 KiB.
const HUGE: usize = 2 << 20;

// SAFETY: the map is this value's own, like the memory of a box.
unsafe impl<T: Zeroed + Send> Send for Table<T> {}
// SAFETY: as above; through a shared reference it is only read.
unsafe impl<T: Zeroed + Sync> Sync for Table<T> {}

impl<T: Zeroed> Table<T> {
    /// So many values.
    pub(super) fn new(length: usize) -> Self {
        let layout = Layout::array::<T>(length).expect("a table fits into the address space");
        // Room to begin on a boundary; what is never touched takes no memory.
        let mapped = layout.size().next_multiple_of(HUGE) + HUGE;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new anonymous map replaces no other one.
        let map = unsafe { mmap_anonymous(ptr::null_mut(), mapped, protection, flags) };
        let Some(map) = map.ok().and_then(|map| NonNull::new(map.cast::<u8>())) else {
            handle_alloc_error(layout);
        };
        let before = map.align_offset(HUGE);
        // SAFETY: less than `HUGE` bytes are before the boundary, and `mapped` has as many to spare.
        let first = unsafe { map.add(before) };
        // SAFETY: this range is within the map, and the advice does not change what is in it. It may be
        // refused (a kernel without huge pages), which costs time only.
        let _ = unsafe { madvise(first.as_ptr().cast(), mapped - HUGE, Advice::LinuxHugepage) };
        Self {
            map,
            mapped,
            first: first.cast(),
            length,
            owned: PhantomData,
        }
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nobody borrows from it any more. It cannot fail.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), self.mapped) };
    }
}

impl<T: Zeroed> Deref for Table<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `length` values from `first` on lie within the map, aligned (a huge page is, for every type)
        // and initialised with zeros, which `Zeroed` says is valid.
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.length) }
    }
}

impl<T: Zeroed> DerefMut for Table<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; `&mut self` says that nobody else has them.
        unsafe { slice::from_raw_parts_mut(self.first.as_ptr(), self.length) }
    }
}

/// A cache line.
const LINE: usize = 64;

/// Asks the processor for a value that will be needed soon. Nothing waits for it.
#[inline]
pub fn prefetch<T>(value: Option<&T>) {
    let Some(value) = value else { return };
    for line in lines(value) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 has the instruction; it changes nothing but the caches.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: every `AArch64` has the instruction; it changes nothing but the caches.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) line, options(nostack, readonly, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        std::hint::black_box(line);
    }
}

/// Asks for a value that will be written to soon, and of which another core may have a copy.
#[inline]
pub fn prefetch_to_write<T>(value: Option<&T>) {
    let Some(value) = value else { return };
    for line in lines(value) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: 64-bit processors that do not have the instruction take it for none (Intel's manual, volume 2,
        // PREFETCHW); it changes nothing but the caches.
        unsafe {
            std::arch::asm!("prefetchw [{0}]", in(reg) line, options(nostack, readonly, preserves_flags));
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: every `AArch64` has the instruction; it changes nothing but the caches.
        unsafe {
            std::arch::asm!("prfm pstl1keep, [{0}]", in(reg) line, options(nostack, readonly, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        std::hint::black_box(line);
    }
}

/// The beginnings of the cache lines of a value that begins at one.
#[inline]
fn lines<T>(value: &T) -> impl Iterator<Item = *const u8> + use<T> {
    let first = ptr::from_ref(value).cast::<u8>();
    (0..size_of::<T>())
        .step_by(LINE)
        .map(move |at| first.wrapping_add(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_that_can_be_written() {
        for length in [0, 1, 8192, (HUGE / 8) + 1] {
            let mut words = Words::new(length);
            assert_eq!(words.len(), length);
            assert!(words.iter().all(|word| *word == 0));
            words.fill(7);
            prefetch(words.last());
            assert!(words.iter().all(|word| *word == 7));
        }
    }
}
